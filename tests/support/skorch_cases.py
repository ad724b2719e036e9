"""skorch nets, for the tests of the integration."""

import pickle

import skorch
import skorch.dataset
import skorch.helper
import torch
from skorch.callbacks import Callback, Checkpoint, GradientNormClipping, LoadInitState, LRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trainer_cases import BATCHES, EPOCHS, ROWS, Network, Run, data, distance, snapshot

from stormplus import StormPlus, Untuned
from stormplus.integrations.skorch import StormMixin
from stormplus.torch import PairedOptimizer


class Net(StormMixin, skorch.NeuralNet):
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


class Watch(Callback):
    """One seed a sample, as the plain loop has it; notes where the net is afterwards."""

    def __init__(self, run=None, first=0, each=1):
        self.run, self.count, self.each = run or Run(), first, each

    def on_batch_begin(self, net, training=False, **_):
        if training:
            self.run.opt, self.run.net = net.optimizer_, net.module_
            epoch, place = divmod(self.count, -(-BATCHES // self.each))
            torch.manual_seed(epoch * BATCHES + place * self.each)

    def on_batch_end(self, net, training=False, **_):
        if training:
            self.count += 1
            self.run.states.append(snapshot(net.module_))


def made(kind=Net, watch=None, callbacks=(), epochs=EPOCHS, **options):
    watch = watch or Watch()
    torch.manual_seed(0)
    settings = {
        "criterion": Distance,
        "batch_size": ROWS,
        "max_epochs": epochs,
        "train_split": None,
        "verbose": 0,
        "callbacks": [*callbacks, ("watch", watch)],
    }
    return kind(Network, **settings | options), watch.run


def fit(
    folder, *, kind=StormPlus, tool=None, run=None, epochs=EPOCHS, accumulate=1, clip=None,
    dtype=torch.float64, half=None, schedule=None, setup=None, lr=1.0, first=0, callbacks=(),
    net=None, **options,
):  # fmt: skip
    tool = issubclass(kind, PairedOptimizer) if tool is None else tool
    callbacks = [*callbacks]
    if clip is not None:
        callbacks.append(("clip", GradientNormClipping(clip)))
    if schedule is not None:
        rate = LRScheduler(LambdaLR, lr_lambda=schedule, step_every="batch")
        callbacks.append(("rate", rate))
    bases = [Bf16] * (half is not None) + [Accumulating] * (accumulate > 1)
    bases += [net or (Net if tool else skorch.NeuralNet)]
    net, run = made(
        type("Made", tuple(bases), {}), Watch(run, first, accumulate), callbacks, epochs,
        batch_size=ROWS * accumulate, optimizer=kind, lr=lr, module__dtype=dtype, **options,
    )  # fmt: skip
    net.initialize()
    if setup is not None:
        setup(net.module_)
    net.partial_fit(*data(dtype=dtype))
    run.trainer = net
    return run


def with_params(folder):
    files = {"f_params": folder / "p.pt", "f_optimizer": folder / "o.pt"}
    first = fit(folder, epochs=1)
    first.trainer.save_params(**files)
    net, run = made(watch=Watch(first=BATCHES), epochs=1)
    net.initialize()
    net.load_params(**files)
    net.partial_fit(*data())
    return first, run


def with_checkpoints(folder):
    first, last = (Checkpoint(monitor=None, dirname=folder) for _ in range(2))
    start = fit(folder, epochs=1, callbacks=[("save", first)])
    load = ("load", LoadInitState(last))
    return start, fit(folder, epochs=1, first=BATCHES, callbacks=[load])


def pickled(folder):
    net, first = made(epochs=1)
    net.fit(*data())
    again = pickle.loads(pickle.dumps(net))
    again.partial_fit(*data())
    rest = dict(again.callbacks_)["watch"].run  # its copy goes on from where it was
    rest.states = rest.states[BATCHES:]
    rest.net.evaluations -= first.net.evaluations
    return first, rest


RESUMES = {"save_params": with_params, "Checkpoint": with_checkpoints, "pickle": pickled}


class Validated(Callback):
    """Where the net was validated, by the number of steps so far."""

    def __init__(self, run):
        self.run = run
        run.validated = {}

    def on_batch_end(self, net, training=False, **_):
        if not training:
            self.run.validated[len(self.run.states)] = snapshot(net.module_)


def untuned(folder, epochs=EPOCHS, callbacks=(), **options):
    run = Run()
    every = Checkpoint(
        monitor=None, dirname=folder, f_params="{last_epoch[epoch]}.pt", f_optimizer="o.pt",
        f_history=None, f_criterion=None,
    )  # fmt: skip
    best = Checkpoint(monitor="valid_loss_best", dirname=folder, f_params="best.pt")
    rows = skorch.helper.predefined_split(skorch.dataset.Dataset(*data(1)))
    fit(
        folder, kind=Untuned, tool=True, run=run, epochs=epochs, train_split=rows,
        callbacks=[*callbacks, ("validated", Validated(run)), ("every", every), ("best", best)],
        **options,
    )  # fmt: skip
    run.saved = {
        BATCHES * epoch: torch.load(folder / f"{epoch}.pt", weights_only=True)
        for epoch in range(1, epochs + 1)
    }
    return run


def untuned_in_two(folder):
    first = untuned(folder, epochs=1)
    files = {"f_params": folder / "1.pt", "f_optimizer": folder / "o.pt"}
    net, run = made(watch=Watch(first=BATCHES), epochs=1, optimizer=Untuned)
    net.initialize()
    net.load_params(**files)
    net.partial_fit(*data())
    return first, run
