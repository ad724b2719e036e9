"""Lightning modules and trainers for the tests, in one process and in several."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from trainer_cases import (
    BATCHES,
    EPOCHS,
    ROWS,
    Run,
    data,
    loss_of,
    make,
    network,
    nothing,
    snapshot,
)

from stormplus import StormPlus
from stormplus.integrations.lightning import StormPlusCallback, UntunedCallback
from stormplus.torch import PairedOptimizer
from stormplus.versions import release

# Older ones load a checkpoint as torch does by default, and take no such argument.
SAFELY = {"weights_only": True} if release("lightning") >= (2, 6) else {}


class Module(LightningModule):
    """Seeds the random numbers of a sample with the number of its first batch."""

    def __init__(
        self, dtype=torch.float64, kind=StormPlus, schedule=None, seeded=True, dropout=0.3,
        **options,
    ):  # fmt: skip
        super().__init__()
        self.net, self.metric = network(dtype, dropout), MeanMetric()
        self.kind, self.schedule, self.seeded, self.options = kind, schedule, seeded, options
        self.losses = []

    def on_train_batch_start(self, batch, batch_idx):
        if self.seeded and batch_idx % self.trainer.accumulate_grad_batches == 0:
            torch.manual_seed(self.current_epoch * self.trainer.num_training_batches + batch_idx)

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, *batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.metric(loss)
        self.log("mean", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        opt = make(self.kind, self.parameters(), **self.options)
        if self.schedule is None:
            return opt
        scheduler = {"scheduler": LambdaLR(opt, self.schedule), "interval": "step"}
        return {"optimizer": opt, "lr_scheduler": scheduler}


class Validated(Module):
    def validation_step(self, batch, batch_idx):
        self.validated = snapshot(self.net)
        self.log("val_loss", loss_of(self.net, *batch))


class Manual(Module):
    """Manual optimization; `step(module, opt, closure)` is the test's."""

    def __init__(self, step, **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.step = step

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()

        def closure():
            opt.zero_grad()
            loss = loss_of(self.net, *batch)
            self.manual_backward(loss)
            return loss

        self.step(self, opt, closure)


class Recorder(Callback):
    """Records the network after every step, and where it was validated."""

    def __init__(self, run=None, after=nothing):
        self.run, self.after, self.first = run or Run(), after, None

    def on_train_start(self, trainer, pl_module):
        self.run.opt, self.run.net, self.run.module = (
            trainer.optimizers[0],
            pl_module.net,
            pl_module,
        )
        self.first = trainer.global_step - len(self.run.states)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step - self.first > len(self.run.states):
            self.run.states.append(snapshot(pl_module.net))
            self.after(pl_module.net)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.run.validated[trainer.global_step] = pl_module.validated


def loader(batches=BATCHES, dtype=torch.float64, rows=ROWS, **options):
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


def half_plugin(scale):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def run(module, train_loader, *callbacks, callback=None, **options):
    """With the callback: what the run leaves, and the trainer."""
    recorder = Recorder()
    own = StormPlusCallback() if callback is None else callback
    fit = trainer(own, recorder, *callbacks, **options)
    fit.fit(module, train_loader)
    return recorder.run, fit


def weights_of(path):
    saved = torch.load(path, weights_only=True)["state_dict"]
    return {k.removeprefix("net."): v for k, v in saved.items() if k.startswith("net.")}


def fit(
    folder, *callbacks, kind=StormPlus, tool=True, run=None, epochs=EPOCHS, accumulate=1, clip=None,
    dtype=torch.float64, half=None, scale=None, schedule=None, setup=nothing, after=nothing, lr=1.0,
    watch=False, resume=False, recalibrate_batches=0,
):  # fmt: skip
    recorder = Recorder(run, after)
    run = recorder.run
    own = StormPlusCallback()
    if not issubclass(kind, PairedOptimizer):
        own = UntunedCallback(recalibrate_batches=recalibrate_batches)
    plugin = half_plugin(scale) if scale else None
    precision = {"plugins": [plugin]} if scale else {"precision": half and "bf16-mixed"}
    savers = [
        ModelCheckpoint(folder, save_top_k=-1, filename="{step}", every_n_train_steps=2),
        ModelCheckpoint(folder, monitor="val_loss", filename="best"),
    ]
    made = run.trainer = trainer(
        *callbacks, *savers * watch, recorder, *[own] * tool, epochs=epochs, gradient_clip_val=clip,
        enable_checkpointing=watch, accumulate_grad_batches=accumulate, num_sanity_val_steps=1,
        **precision,
    )  # fmt: skip
    module = (Validated if watch else Module)(dtype, kind, schedule, lr=lr)
    setup(module.net)
    rows, path = loader(dtype=dtype), folder / f"step={BATCHES}.ckpt" if resume else None
    made.fit(module, rows, rows if watch else None, ckpt_path=path, **SAFELY)
    run.scaler = plugin and plugin.scaler
    if watch:
        paths = [*folder.glob("step=*.ckpt"), savers[1].best_model_path]
        steps = [torch.load(path, weights_only=True)["global_step"] for path in paths]
        run.saved = {step: weights_of(path) for step, path in zip(steps, paths)}
    return run
