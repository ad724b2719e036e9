"""skorch nets, for the tests: options are those of the net, and `net`, its class."""

import skorch
import skorch.dataset
import skorch.helper
import torch
from skorch.callbacks import Callback, Checkpoint, GradientNormClipping, LRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stormplus.integrations.skorch import StormPlusNetMixin
from tests.support.trainer_cases import BATCHES, ROWS, Network, data, distance, snapshot


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
    """One seed per sample, as in the plain loop."""

    def __init__(self, s):
        self.s, self.count = s, BATCHES * s.resume

    def on_batch_begin(self, net, training=False, **_):
        if training:
            self.s.run.opt, self.s.run.net = net.optimizer_, net.module_
            epoch, place = divmod(self.count, -(-BATCHES // self.s.accumulate))
            torch.manual_seed(epoch * BATCHES + place * self.s.accumulate)

    def on_batch_end(self, net, training=False, **_):
        if training:
            self.count += 1
            self.s.run.losses.append(net.history[-1, "batches", -1, "train_loss"])
            self.s.record()
        else:
            self.s.run.validated[len(self.s.run.states)] = snapshot(net.module_)


def train(s):
    callbacks, options = [*s.callbacks], dict(s.options)
    if s.clip is not None:
        callbacks.append(("clip", GradientNormClipping(s.clip)))
    if s.schedule is not None:
        rate = LRScheduler(LambdaLR, lr_lambda=s.schedule, step_every="batch")
        callbacks.append(("rate", rate))
    if s.watch:
        options["train_split"] = skorch.helper.predefined_split(skorch.dataset.Dataset(*data(1)))
        every = Checkpoint(
            monitor=None, dirname=s.folder, f_params="{last_epoch[epoch]}.pt",
            f_optimizer="{last_epoch[epoch]}.opt", f_history=None, f_criterion=None,
        )  # fmt: skip
        best = Checkpoint(monitor="valid_loss_best", dirname=s.folder, f_params="best.pt")
        callbacks += [("every", every), ("best", best)]
    bases = [Bf16] * (s.half is not None) + [Accumulating] * (s.accumulate > 1)
    bases += [options.pop("net", Net if s.tool else skorch.NeuralNet)]
    settings = {
        "module__dtype": s.dtype,
        "criterion": Distance,
        "optimizer": s.kind,
        "lr": s.lr,
        "batch_size": ROWS * s.accumulate,
        "max_epochs": s.epochs - s.resume,
        "train_split": None,
        "verbose": 0,
        "callbacks": [*callbacks, ("recorder", Recorder(s))],
    }
    torch.manual_seed(0)
    kind = bases[0] if len(bases) == 1 else type("Made", tuple(bases), {})
    net = s.run.trainer = kind(Network, **settings | options)
    net.initialize()
    s.prepared(net.module_)
    if s.resume:
        net.load_params(f_params=s.folder / "1.pt", f_optimizer=s.folder / "1.opt")
    net.partial_fit(*s.data())
    if s.watch and not s.resume:
        for i in range(1, s.epochs + 1):
            s.run.saved[BATCHES * i] = torch.load(s.folder / f"{i}.pt", weights_only=True)


def again(run):
    run.trainer.partial_fit(*data())


def evaluate(run):
    run.trainer.predict(data(1)[0])
