"""skorch nets, for the tests of the integration."""

import skorch
import skorch.dataset
import skorch.helper
import torch
from skorch.callbacks import Callback, Checkpoint, GradientNormClipping, LRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainer_cases import BATCHES, EPOCHS, ROWS, Network, Run, data, distance, nothing, snapshot

from stormplus import StormPlus
from stormplus.integrations.skorch import StormPlusNetMixin


class Net(StormPlusNetMixin, skorch.NeuralNet):
    pass


class Bf16:
    def infer(self, x, **fit_params):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().infer(x, **fit_params).float()


class Accumulating:
    """Micro-batches inside the closure: the way that works."""

    def train_step_single(self, batch, **fit_params):
        parts = list(zip(*(part.split(ROWS) for part in batch)))
        steps = [super(Accumulating, self).train_step_single(part) for part in parts]
        for p in self.module_.parameters():
            p.grad /= len(parts)
        return {
            "loss": torch.stack([step["loss"].detach() for step in steps]).mean(),
            "y_pred": torch.cat([step["y_pred"] for step in steps]),
        }


class Distance(nn.Module):
    def forward(self, out, y):
        return distance(out, y)


class Recorder(Callback):
    """One seed per sample, as in the plain loop; records where the net is afterwards."""

    def __init__(self, run=None, first=0, each=1, after=nothing):
        self.run, self.count, self.each, self.after = run or Run(), first, each, after

    def on_batch_begin(self, net, training=False, **_):
        if training:
            self.run.opt, self.run.net = net.optimizer_, net.module_
            epoch, place = divmod(self.count, -(-BATCHES // self.each))
            torch.manual_seed(epoch * BATCHES + place * self.each)

    def on_batch_end(self, net, training=False, **_):
        if not training:
            self.run.validated[len(self.run.states)] = snapshot(net.module_)
            return
        self.count += 1
        self.run.states.append(snapshot(net.module_))
        self.after(net.module_)


def made(kind=Net, recorder=None, callbacks=(), epochs=EPOCHS, **options):
    recorder = recorder or Recorder()
    torch.manual_seed(0)
    settings = {
        "criterion": Distance,
        "batch_size": ROWS,
        "max_epochs": epochs,
        "train_split": None,
        "verbose": 0,
        "callbacks": [*callbacks, ("recorder", recorder)],
    }
    return kind(Network, **settings | options), recorder.run


def fit(
    folder, *callbacks, kind=StormPlus, tool=True, run=None, epochs=EPOCHS, accumulate=1, clip=None,
    dtype=torch.float64, half=None, schedule=None, setup=nothing, after=nothing, lr=1.0,
    watch=False, resume=False, net=None, **options,
):  # fmt: skip
    callbacks = [*callbacks]
    if clip is not None:
        callbacks.append(("clip", GradientNormClipping(clip)))
    if schedule is not None:
        rate = LRScheduler(LambdaLR, lr_lambda=schedule, step_every="batch")
        callbacks.append(("rate", rate))
    if watch:
        options["train_split"] = skorch.helper.predefined_split(skorch.dataset.Dataset(*data(1)))
        every = Checkpoint(
            monitor=None, dirname=folder, f_params="{last_epoch[epoch]}.pt",
            f_optimizer="{last_epoch[epoch]}.opt", f_history=None, f_criterion=None,
        )  # fmt: skip
        best = Checkpoint(monitor="valid_loss_best", dirname=folder, f_params="best.pt")
        callbacks += [("every", every), ("best", best)]
    bases = [Bf16] * (half is not None) + [Accumulating] * (accumulate > 1)
    bases += [net or (Net if tool else skorch.NeuralNet)]
    net, run = made(
        type("Made", tuple(bases), {}), Recorder(run, BATCHES * resume, accumulate, after),
        callbacks, epochs - resume, batch_size=ROWS * accumulate, optimizer=kind, lr=lr,
        module__dtype=dtype, **options,
    )  # fmt: skip
    net.initialize()
    run.trainer = net
    setup(net.module_)
    if resume:
        net.load_params(f_params=folder / "1.pt", f_optimizer=folder / "1.opt")
    net.partial_fit(*data(dtype=dtype))
    if watch and not resume:
        epochs = range(1, epochs + 1)
        run.saved = {BATCHES * i: torch.load(folder / f"{i}.pt", weights_only=True) for i in epochs}
    return run


def again(run):
    run.trainer.partial_fit(*data())
