"""fastai learners, for the tests of the integration."""

import warnings

import torch
from trainer_cases import BATCHES, EPOCHS, ROWS, Run, data, distance, network, snapshot

from stormplus import StormPlus, Untuned
from stormplus.torch import PairedOptimizer

with warnings.catch_warnings():
    # fastai's own, while it is imported: so the tests take its names from here
    warnings.simplefilter("ignore")
    from fastai.callback.core import (
        Callback,
        CancelBatchException,  # noqa: F401
    )
    from fastai.callback.fp16 import (
        AMPMode,
        MixedPrecision,
        NonNativeMixedPrecision,  # noqa: F401
    )
    from fastai.callback.schedule import ParamScheduler
    from fastai.callback.tracker import SaveModelCallback
    from fastai.callback.training import (
        GradientAccumulation,  # noqa: F401
        GradientClip,
    )
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper  # noqa: F401
    from fastcore.basics import noop

    from stormplus.integrations.fastai import (
        StormCallback,
        UntunedCallback,
        UntunedWatch,  # noqa: F401
    )
    from stormplus.integrations.fastai import opt_func as ours


class Watch(Callback):
    """One seed a sample, as the plain loop has it; notes where the model is afterwards."""

    order, run_valid = -5, False

    def __init__(self, run=None, first=0):
        self.run_, self.number, self.seen = run or Run(), first, []

    def before_batch(self):
        self.run_.opt, self.run_.net = self.learn.opt.opt, self.learn.model
        torch.manual_seed(self.number)

    def after_batch(self):
        self.number += 1
        self.seen.append(self.learn.loss.item())
        self.run_.states.append(snapshot(self.learn.model))


class OnTheCPU(MixedPrecision):
    """fastai's callback with the device that is here."""

    def before_fit(self):
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        self.learn.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.scales = []


class Pairs(list):
    def new_empty(self):  # for learn.export
        return Pairs()


def learner(
    folder, *callbacks, watch=None, opt_func=None, net=None, tool=True,
    dtype=torch.float32, **options,
):  # fmt: skip
    pairs = Pairs(zip(*data(dtype=dtype)))
    dls = DataLoaders(
        *(DataLoader(pairs, bs=ROWS, shuffle=False) for _ in range(2)),
        device=torch.device("cpu"),
    )
    watch = watch or Watch()
    learn = Learner(
        dls, network(dtype) if net is None else net, distance, path=folder,
        opt_func=ours() if opt_func is None else opt_func,
        cbs=[*[StormCallback()] * tool, watch, *callbacks], **options,
    )  # fmt: skip
    learn.logger = noop  # silent, and can be pickled
    learn.create_mbar = False
    if hasattr(learn, "progress"):
        learn.remove_cb(learn.progress)
    return learn, watch.run_


def fit(
    folder, *callbacks, kind=StormPlus, tool=None, run=None, epochs=EPOCHS, clip=None, half=None,
    schedule=None, setup=lambda net: None, lr=1.0, first=0, load=None, opt_func=None,
    dtype=torch.float32,
):  # fmt: skip
    tool = issubclass(kind, PairedOptimizer) if tool is None else tool
    callbacks = [*callbacks]
    if clip is not None:
        callbacks.append(GradientClip(clip))
    if half is not None:
        callbacks.append(OnTheCPU(amp_mode=AMPMode.BF16))
    if schedule is not None:
        steps = epochs * BATCHES
        callbacks.append(ParamScheduler({"lr": lambda pos: lr * schedule(round(pos * steps))}))
    net = network(dtype)
    setup(net)
    learn, run = learner(
        folder, *callbacks, watch=Watch(run, first), net=net, tool=tool, dtype=dtype,
        opt_func=opt_func or ours(kind, lr=lr),  # 1.0 is what Untuned has
    )  # fmt: skip
    if load:
        learn.load(load)
    learn.fit(epochs)
    run.learn = learn
    return run


def in_two(folder):
    first = fit(folder, epochs=1)
    first.learn.save("half")
    return first, fit(folder, epochs=1, first=BATCHES, load="half")


RESUMES = {"save and load": in_two}


class Validated(Callback):
    """Where the network was validated, by the number of steps so far."""

    run_train = False

    def __init__(self, run):
        self.run_ = run
        run.validated = {}

    def after_pred(self):
        self.run_.validated[len(self.run_.states)] = snapshot(self.learn.model)


def untuned(folder, *callbacks, callback=None, epochs=EPOCHS, **options):
    run = Run()
    tool = [UntunedCallback()] if callback is None else callback
    saves = [SaveModelCallback(monitor="valid_loss", every_epoch=True)]
    fit(
        folder, *tool, *saves, Validated(run), *callbacks, kind=Untuned, tool=False, run=run,
        epochs=epochs, **options,
    )  # fmt: skip
    run.learn.remove_cbs(run.learn.cbs.filter(lambda cb: cb.name in ("save_model", "validated")))
    run.learn.save("half")
    run.saved = {
        BATCHES * (i + 1): torch.load(folder / "models" / f"model_{i}.pth", weights_only=True)
        for i in range(epochs)
    }
    return run


def untuned_in_two(folder):
    return untuned(folder, epochs=1), untuned(folder, epochs=1, first=BATCHES, load="half")
