"""fastai learners, for the tests: options are those of `Learner`, and `verb`."""

import warnings

import torch

from tests.support.trainer_cases import BATCHES, ROWS, distance, snapshot

with warnings.catch_warnings():
    # fastai's own, while it is imported: so the tests take its names from here
    warnings.simplefilter("ignore")
    import fastai.callback.schedule
    import fastai.distributed
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
    """One seed per sample, as in the plain loop."""

    order = -5

    def __init__(self, s):
        self.s, self.number = s, BATCHES * s.resume

    def before_batch(self):
        self.s.run.opt = self.learn.opt.opt
        if self.learn.training:
            torch.manual_seed(self.number)

    def after_pred(self):
        if not self.learn.training:
            self.s.run.validated[self.number] = snapshot(self.learn.model)

    def after_batch(self):
        if self.learn.training:
            self.number += 1
            self.s.run.losses.append(self.learn.loss.item())
            self.s.record()


class OnTheCPU(MixedPrecision):
    """fastai's callback with the device that is here."""

    def before_fit(self):
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        self.learn.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.scales = []


class Pairs(list):
    def new_empty(self):  # for learn.export
        return Pairs()


def train(s):
    """Options besides the learner's: `verb`, called with the learner in place of `fit`."""
    run, callbacks, options = s.run, [*s.callbacks], dict(s.options)
    verb = options.pop("verb", lambda learn: learn.fit(s.epochs - s.resume))
    if s.clip is not None:
        callbacks.append(GradientClip(s.clip))
    if s.half is not None:
        callbacks.append(OnTheCPU(amp_mode=AMPMode.BF16))
    if s.schedule is not None:
        rates = {"lr": lambda pos: s.lr * s.schedule(round(pos * s.epochs * BATCHES))}
        callbacks.append(fastai.callback.schedule.ParamScheduler(rates))
    saver = SaveModelCallback(monitor="valid_loss", every_epoch=True, with_opt=True)
    untuned = UntunedCallback(recalibrate_batches=s.recalibrate_batches)
    own = StormPlusCallback() if s.pairs else untuned
    pairs = Pairs(zip(*s.data()))
    loaders = [DataLoader(pairs, bs=ROWS, shuffle=False) for _ in range(2)]
    options = {"opt_func": opt_func(s.kind, lr=s.lr)} | options
    learn = run.learn = Learner(
        DataLoaders(*loaders, device=torch.device("cpu")), s.network(), distance, path=s.folder,
        cbs=[*[own] * s.tool, Watch(s), *callbacks, *[saver] * s.watch], **options,
    )  # fmt: skip
    learn.logger = noop  # silent, and can be pickled
    learn.create_mbar = False
    if hasattr(learn, "progress"):
        learn.remove_cb(learn.progress)
    if s.resume:
        learn.load("model_0")
    verb(learn)
    if s.watch:
        learn.remove_cb(saver)
        for i in range(s.epochs - s.resume):
            saved = torch.load(s.folder / "models" / f"model_{i}.pth", weights_only=True)
            run.saved[BATCHES * (i + 1 + s.resume)] = saved["model"]


def again(run):
    run.learn.fit(2)
