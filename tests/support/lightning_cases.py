"""Lightning modules and trainers for the tests, in one process and in several."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from trainer_cases import BATCHES, EPOCHS, ROWS, Run, data, loss_of, make, network, snapshot

from stormplus import StormPlus, Untuned
from stormplus.integrations.lightning import StormPlusCallback, UntunedCallback
from stormplus.torch import PairedOptimizer
from stormplus.versions import release

# Older ones load a checkpoint as torch does by default, and take no such argument.
SAFELY = {"weights_only": True} if release("lightning") >= (2, 6) else {}


class Module(LightningModule):
    """Seeds the random numbers of a sample with the number of its first batch."""

    def __init__(
        self,
        dtype=torch.float64,
        kind=StormPlus,
        schedule=None,
        seeded=True,
        dropout=0.3,
        **options,
    ):
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


class Manual(Module):
    """The loop of one's own inside `training_step`."""

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
    """The network after every step."""

    def __init__(self, run=None):
        self.run, self.first = run or Run(), None

    def on_train_start(self, trainer, pl_module):
        self.run.opt, self.run.net = trainer.optimizers[0], pl_module.net
        self.first = trainer.global_step - len(self.run.states)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step - self.first > len(self.run.states):
            self.run.states.append(snapshot(pl_module.net))


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


# -- what the table asks for ---------------------------------------------------------------------


def fit(
    folder, *, kind=StormPlus, tool=None, run=None, epochs=EPOCHS, accumulate=1, clip=None,
    dtype=torch.float64, half=None, scale=None, schedule=None, setup=lambda net: None, lr=1.0,
    resume=None, save=None,
):  # fmt: skip
    tool = issubclass(kind, PairedOptimizer) if tool is None else tool
    recorder = Recorder(run)
    callbacks = [StormPlusCallback()] * tool + [recorder]
    plugin = half_plugin(scale) if scale else None
    precision = {"plugins": [plugin]} if scale else {"precision": half and "bf16-mixed"}
    saver = [ModelCheckpoint(folder, filename="half")] if save else []
    made = trainer(
        *callbacks, *saver, epochs=epochs, gradient_clip_val=clip, enable_checkpointing=bool(save),
        accumulate_grad_batches=accumulate, **precision,
    )  # fmt: skip
    module = Module(dtype, kind, schedule, lr=lr)
    setup(module.net)
    made.fit(module, loader(dtype=dtype), ckpt_path=resume, **SAFELY)
    recorder.run.trainer, recorder.run.scaler = made, plugin and plugin.scaler
    return recorder.run


def in_two(folder):
    first = fit(folder, epochs=1, save=True)
    return first, fit(folder, resume=folder / "half.ckpt", save=True)


RESUMES = {"ckpt_path": in_two}


class ValidatedModule(Module):
    def validation_step(self, batch, batch_idx):
        self.validated = snapshot(self.net)
        self.log("val_loss", loss_of(self.net, *batch))


class Validated(Callback):
    """Where the network was validated, by the number of steps so far."""

    def __init__(self, run):
        self.run = run
        run.validated = {}

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.run.validated[trainer.global_step] = pl_module.validated


def untuned(folder, *callbacks, resume=None, epochs=EPOCHS, callback=None, **options):
    recorder = Recorder()
    run = recorder.run
    saver = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", every_n_train_steps=4)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best")
    tool = [UntunedCallback()] if callback is None else callback
    run.trainer = trainer(
        *callbacks, best, saver, recorder, Validated(run), *tool, epochs=epochs,
        enable_checkpointing=True, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    module = run.module = ValidatedModule(kind=Untuned)
    rows = loader()
    run.trainer.fit(module, rows, rows, ckpt_path=resume, **SAFELY)
    run.trainer.save_checkpoint(folder / f"step={run.trainer.global_step}.ckpt")
    run.saved = {
        int(path.stem.split("=")[1]): weights_of(path) for path in folder.glob("step=*.ckpt")
    }
    best_file = torch.load(best.best_model_path, weights_only=True)
    run.saved[best_file["global_step"]] = weights_of(best.best_model_path)
    return run


def weights_of(path):
    saved = torch.load(path, weights_only=True)["state_dict"]
    return {k.removeprefix("net."): v for k, v in saved.items() if k.startswith("net.")}


def untuned_in_two(folder):
    first = untuned(folder, epochs=1)
    return first, untuned(folder, resume=folder / f"step={BATCHES}.ckpt")
