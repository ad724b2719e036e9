"""Lightning modules and trainers for the tests, in one process and in several."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from trainer_cases import ROWS, data, loss_of, network, snapshot

from stormplus import StormPlus
from stormplus.integrations.lightning import StormPlusCallback


class Module(LightningModule):
    """Counts its evaluations; seeds the random numbers of an epoch with its number."""

    def __init__(self, dtype=torch.float64, schedule=None, seeded=True, dropout=0.3, **options):
        super().__init__()
        self.net = network(dtype, dropout)
        self.metric = MeanMetric()
        self.schedule, self.seeded, self.options = schedule, seeded, options
        self.evaluations, self.losses = 0, []

    def on_train_batch_start(self, batch, batch_idx):
        if self.seeded and batch_idx == 0:
            torch.manual_seed(self.current_epoch)

    def training_step(self, batch, batch_idx):
        self.evaluations += 1
        loss = loss_of(self.net, *batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.metric(loss)
        self.log("mean", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        opt = StormPlus(self.parameters(), **self.options)
        if self.schedule is None:
            return opt
        scheduler = {"scheduler": self.schedule(opt), "interval": "step"}
        return {"optimizer": opt, "lr_scheduler": scheduler}


class Manual(Module):
    """The loop of one's own inside `training_step`."""

    def __init__(self, step, **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.step = step

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()

        def closure():
            self.evaluations += 1
            opt.zero_grad()
            loss = loss_of(self.net, *batch)
            self.manual_backward(loss)
            return loss

        self.step(self, opt, closure)


class Recorder(Callback):
    """The network after every step."""

    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step > len(self.states):
            self.states.append(snapshot(pl_module.net))


def loader(batches, dtype=torch.float64, rows=ROWS, **options):
    return DataLoader(TensorDataset(*data(batches, dtype)), batch_size=rows, **options)


def trainer(*callbacks, epochs=1, **options):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(callbacks=list(callbacks), **settings | options)


def run(module, train_loader, *callbacks, callback=None, **options):
    recorder = Recorder()
    own = StormPlusCallback() if callback is None else callback
    fit = trainer(own, recorder, *callbacks, **options)
    fit.fit(module, train_loader)
    return recorder.states, fit


def autocast_loss(dtype):
    def loss(model, x, y):
        with torch.autocast("cpu", dtype=dtype):
            return F.smooth_l1_loss(model(x), y)

    return loss
