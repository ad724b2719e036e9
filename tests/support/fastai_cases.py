"""fastai learners, for the tests of the integration."""

import warnings

import torch
from trainer_cases import BATCHES, EPOCHS, ROWS, Run, data, distance, network, nothing, snapshot

from stormplus import StormPlus
from stormplus.torch import PairedOptimizer

with warnings.catch_warnings():
    # fastai's own, while it is imported: so the tests take its names from here
    warnings.simplefilter("ignore")
    import fastai.callback.schedule
    from fastai.callback.core import Callback
    from fastai.callback.fp16 import AMPMode, MixedPrecision
    from fastai.callback.tracker import SaveModelCallback
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastcore.basics import noop

    from stormplus.integrations.fastai import StormPlusCallback, UntunedCallback, opt_func


class Watch(Callback):
    """One seed per sample, as in the plain loop; records where the model is afterwards."""

    order = -5

    def __init__(self, run=None, first=0, after=nothing):
        self.run_, self.number, self.after_, self.seen = run or Run(), first, after, []

    def before_batch(self):
        self.run_.opt, self.run_.net = self.learn.opt.opt, self.learn.model
        if self.learn.training:
            torch.manual_seed(self.number)

    def after_pred(self):
        if not self.learn.training:
            self.run_.validated[self.number] = snapshot(self.learn.model)

    def after_batch(self):
        if self.learn.training:
            self.number += 1
            self.seen.append(self.learn.loss.item())
            self.run_.states.append(snapshot(self.learn.model))
            self.after_(self.learn.model)


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
    folder, *callbacks, watch=None, kind=StormPlus, net=None, tool=True, dtype=torch.float32,
    recalibrate_batches=0, wrapper=None, **options,
):  # fmt: skip
    pairs = Pairs(zip(*data(dtype=dtype)))
    loaders = [DataLoader(pairs, bs=ROWS, shuffle=False) for _ in range(2)]
    watch = watch or Watch()
    own = StormPlusCallback()
    if not issubclass(kind, PairedOptimizer):
        own = UntunedCallback(recalibrate_batches=recalibrate_batches)
    learn = Learner(
        DataLoaders(*loaders, device=torch.device("cpu")), net or network(dtype), distance,
        path=folder, opt_func=wrapper or opt_func(kind),
        cbs=[*[own] * tool, watch, *callbacks], **options,
    )  # fmt: skip
    learn.logger = noop  # silent, and can be pickled
    learn.create_mbar = False
    if hasattr(learn, "progress"):
        learn.remove_cb(learn.progress)
    return learn, watch.run_


def fit(
    folder, *callbacks, kind=StormPlus, tool=True, run=None, epochs=EPOCHS, clip=None, half=None,
    dtype=torch.float32, schedule=None, setup=nothing, after=nothing, lr=1.0, watch=False,
    resume=False, recalibrate_batches=0,
):  # fmt: skip
    callbacks = [*callbacks]
    if clip is not None:
        callbacks.append(GradientClip(clip))
    if half is not None:
        callbacks.append(OnTheCPU(amp_mode=AMPMode.BF16))
    if schedule is not None:
        steps = epochs * BATCHES
        rates = {"lr": lambda pos: lr * schedule(round(pos * steps))}
        callbacks.append(fastai.callback.schedule.ParamScheduler(rates))
    saver = SaveModelCallback(monitor="valid_loss", every_epoch=True, with_opt=True)
    net = network(dtype)
    setup(net)
    learn, run = learner(
        folder, *callbacks, *[saver] * watch, watch=Watch(run, BATCHES * resume, after),
        kind=kind, net=net, tool=tool, dtype=dtype, recalibrate_batches=recalibrate_batches,
        wrapper=opt_func(kind, lr=lr),
    )  # fmt: skip
    run.learn = learn
    if resume:
        learn.load("model_0")
    learn.fit(epochs - resume)
    if watch:
        learn.remove_cb(saver)
        paths = [folder / "models" / f"model_{i}.pth" for i in range(epochs - resume)]
        run.saved = {
            BATCHES * (i + 1 + resume): torch.load(path, weights_only=True)["model"]
            for i, path in enumerate(paths)
        }
    return run


def again(run):
    run.learn.fit(EPOCHS)
