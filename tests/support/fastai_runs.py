"""fastai learners, for the tests of the integration."""

import warnings

import pytest
import torch
from plain_loop import BATCH, batches, data, network, snapshot
from torch.nn import functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own, while it is imported
    pytest.importorskip("fastai.learner")
    from fastai.callback.core import Callback, CancelBatchException
    from fastai.callback.fp16 import AMPMode, MixedPrecision, NonNativeMixedPrecision
    from fastai.callback.schedule import ParamScheduler, SchedLin
    from fastai.callback.tracker import SaveModelCallback
    from fastai.callback.training import GradientAccumulation, GradientClip
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    from stormplus.integrations.fastai import StormCallback, storm

__all__ = [  # the tests take fastai's names from here, where its warnings are caught
    "AMPMode",
    "Callback",
    "CancelBatchException",
    "GradientAccumulation",
    "GradientClip",
    "MixedPrecision",
    "NonNativeMixedPrecision",
    "OptimWrapper",
    "ParamScheduler",
    "SaveModelCallback",
    "SchedLin",
    "StormCallback",
    "storm",
]

EPOCHS = 2
SAMPLES = len(batches(EPOCHS))


class Watch(Callback):
    """One seed a sample, as the plain loop has it; notes where the model is afterwards."""

    order, run_valid = -5, False

    def __init__(self, first=0):
        self.number, self.snapshots, self.seen = first, [], []

    def before_batch(self):
        torch.manual_seed(self.number)

    def after_batch(self):
        self.number += 1
        self.seen.append(self.learn.loss.item())
        self.snapshots.append(snapshot(self.learn.model))


class Pairs(list):
    def new_empty(self):  # for learn.export
        return Pairs()


def learner(tmp_path, *callbacks, first=0, opt_func=None, model=None, **options):
    pairs = Pairs(zip(*data()))
    dls = DataLoaders(
        *(DataLoader(pairs, bs=BATCH, shuffle=False) for _ in range(2)),
        device=torch.device("cpu"),
    )
    watch = Watch(first)
    learn = Learner(
        dls, network() if model is None else model, F.cross_entropy, path=tmp_path,
        opt_func=storm() if opt_func is None else opt_func,
        cbs=[StormCallback(), watch, *callbacks], **options,
    )  # fmt: skip
    learn.logger = lambda *_: None
    learn.create_mbar = False
    if hasattr(learn, "progress"):
        learn.remove_cb(learn.progress)
    return learn, watch


def fitted(*args, epochs=EPOCHS, **options):
    learn, watch = learner(*args, **options)
    learn.fit(epochs)
    return learn, watch.snapshots


def seeded(i, opt):
    torch.manual_seed(i)
