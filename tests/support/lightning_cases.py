"""Lightning modules and trainers."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from stormplus import same_sample
from stormplus.integrations.lightning import StormPlusCallback, UntunedCallback
from stormplus.versions import release
from tests.support.trainer_cases import BATCHES, ROWS, loss_of, snapshot

# Older ones load a checkpoint as torch does by default, and take no such argument.
SAFELY = {"weights_only": True} if release("lightning") >= (2, 6) else {}
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(LightningModule):
    """Seeds the random numbers of a sample with the number of its first batch."""

    seeded, optimizer_options = True, {}

    def __init__(self, s):
        super().__init__()
        self.s, self.net, self.metric = s, s.network(), MeanMetric()

    def on_train_batch_start(self, batch, batch_idx):
        if self.seeded and batch_idx % self.trainer.accumulate_grad_batches == 0:
            torch.manual_seed(self.current_epoch * self.trainer.num_training_batches + batch_idx)

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, *batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.metric(loss)
        self.log("mean", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        opt = self.s.optimizer(self.parameters(), **self.optimizer_options)
        if self.s.schedule is None:
            return opt
        scheduler = {"scheduler": LambdaLR(opt, self.s.schedule), "interval": "step"}
        return {"optimizer": opt, "lr_scheduler": scheduler}


class Validated(Module):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", loss_of(self.net, *batch))


class Manual(Module):
    """Manual optimization, as the page shows it."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()

        def closure():
            opt.zero_grad()
            loss = loss_of(self.net, *batch)
            self.manual_backward(loss)
            return loss

        opt.step(same_sample(opt.optimizer, self)(closure) if self.s.pairs else closure)


class Recorder(Callback):
    def __init__(self, s):
        self.s = s

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            self.s.run.losses.append(float(trainer.callback_metrics.get("loss_step", 0.0)))
            self.s.record()

    def on_validation_batch_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.s.run.validated[trainer.global_step] = snapshot(self.s.run.net)


def loader(s, **options):
    return DataLoader(TensorDataset(*s.data()), batch_size=ROWS, **options)


def half_plugin(scale):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def weights_of(path):
    saved = torch.load(path, weights_only=True)["state_dict"]
    return {k.removeprefix("net."): v for k, v in saved.items() if k.startswith("net.")}


def train(s):
    """Options besides the trainer's: `module`, `own` (our callback), `loader` and `path`."""
    run, options = s.run, dict(s.options)
    make = options.pop("module", Validated if s.watch else Module)
    untuned = UntunedCallback(recalibrate_batches=s.recalibrate_batches)
    own = options.pop("own", StormPlusCallback() if s.pairs else untuned)
    rows = options.pop("loader", loader(s))
    path = options.pop("path", s.folder / f"step={BATCHES}.ckpt" if s.resume else None)
    if s.scale:
        options["plugins"] = [half_plugin(s.scale)]
        run.scaler = options["plugins"][0].scaler
    elif s.half is not None:
        options["precision"] = "bf16-mixed"
    savers = [
        ModelCheckpoint(s.folder, save_top_k=-1, filename="{step}", every_n_train_steps=2),
        ModelCheckpoint(s.folder, monitor="val_loss", filename="best"),
    ]
    callbacks = [*s.callbacks, *savers * s.watch, Recorder(s), *[own] * s.tool]
    settings = {"max_epochs": s.epochs, "enable_checkpointing": s.watch, "num_sanity_val_steps": 1}
    settings |= {"gradient_clip_val": s.clip, "accumulate_grad_batches": s.accumulate}
    run.trainer = Trainer(callbacks=callbacks, **QUIET | settings | options)
    run.module = make(s)
    run.trainer.fit(run.module, rows, rows if s.watch else None, ckpt_path=path, **SAFELY)
    if s.watch:
        for path in (*s.folder.glob("step=*.ckpt"), savers[1].best_model_path):
            step = torch.load(path, weights_only=True)["global_step"]
            run.saved[step] = weights_of(path)
