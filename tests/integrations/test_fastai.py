"""fastai: the learner's run is the plain loop's, step by step."""

import importlib
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from fastai_runs import (
    EPOCHS,
    SAMPLES,
    AMPMode,
    Callback,
    CancelBatchException,
    GradientAccumulation,
    GradientClip,
    MixedPrecision,
    NonNativeMixedPrecision,
    OptimWrapper,
    ParamScheduler,
    SchedLin,
    StormCallback,
    fitted,
    learner,
    seeded,
    storm,
)
from plain_loop import BATCH, assert_same_runs, batches, data, network, plain_run, snapshot
from torch.nn import functional as F

from stormplus import SimplifiedStormPlus, StormPlus

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_run_is_the_plain_loops(tmp_path):
    learn, watch = learner(tmp_path, opt_func=storm(lr=0.5))
    learn.fit(EPOCHS)
    model = network()
    plain, opt = plain_run(model, batches(EPOCHS), each=seeded, lr=0.5)
    assert_same_runs(watch.snapshots, plain)
    assert learn.model.evaluations == model.evaluations == 2 * SAMPLES - 1
    assert learn.opt.opt.diagnostics() == opt.diagnostics()
    assert plain[-1]["body.1.num_batches_tracked"] == SAMPLES


def test_the_loss_that_metrics_see_is_the_first_evaluations(tmp_path):
    learn, watch = learner(tmp_path)
    learn.fit(1)
    model, before = network(), []

    def each(i, opt):
        torch.manual_seed(i)
        state = snapshot(model)
        x, y = batches()[i]
        before.append(F.cross_entropy(model(x), y).item())
        model.load_state_dict(state)
        torch.manual_seed(i)

    plain_run(model, batches(), each=each)
    assert watch.seen == before


def test_the_papers_lr_is_the_default_and_fit_may_set_another(tmp_path):
    learn, _ = fitted(tmp_path, epochs=1)
    assert learn.lr == learn.opt.opt.param_groups[0]["lr"] == 1.0
    learn, run = learner(tmp_path, opt_func=storm(SimplifiedStormPlus, norm="mean"))
    learn.fit(1, lr=0.25, wd=0.01)
    group = learn.opt.opt.param_groups[0]
    assert type(learn.opt.opt) is SimplifiedStormPlus
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.01)


def test_clipping_sees_both_gradients(tmp_path):
    _, run = fitted(tmp_path, GradientClip(0.1))
    plain, _ = plain_run(network(), batches(EPOCHS), each=seeded, clip=0.1)
    assert_same_runs(run, plain)


def test_schedules_of_the_lr(tmp_path):
    schedule = SchedLin(1.0, 0.0)
    _, run = fitted(tmp_path, ParamScheduler({"lr": schedule}))

    def each(i, opt):
        torch.manual_seed(i)
        epoch, place = divmod(i, SAMPLES // EPOCHS)
        pct = epoch / EPOCHS
        for _ in range(place):  # summed up as fastai does it
            pct += 1.0 / (SAMPLES // EPOCHS * EPOCHS)
        opt.param_groups[0]["lr"] = schedule(pct)

    plain, _ = plain_run(network(), batches(EPOCHS), each=each)
    assert_same_runs(run, plain)


def test_schedules_of_a_momentum_are_refused(tmp_path):
    learn, _ = learner(tmp_path)
    with pytest.raises(ValueError, match=r"no hyper-parameter 'mom'.*fit_flat_cos"):
        learn.fit_one_cycle(1)


class OnTheCPU(MixedPrecision):
    """fastai's callback with the device that is here."""

    def before_fit(self):
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        self.learn.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.scales = []


def test_bf16(tmp_path):
    learn, run = fitted(tmp_path, OnTheCPU(amp_mode=AMPMode.BF16))
    plain, _ = plain_run(network(), batches(EPOCHS), each=seeded, autocast=torch.bfloat16)
    assert_same_runs(run, plain)
    assert learn.model.evaluations == 2 * SAMPLES - 1
    full, _ = plain_run(network(), batches(EPOCHS), each=seeded)
    assert not torch.equal(run[-1]["body.0.weight"], full[-1]["body.0.weight"])


def of_fastai_distributed(name):
    pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's own, while it is imported
        module = importlib.import_module("fastai.distributed")
    return object.__new__(getattr(module, name))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: GradientAccumulation(2 * BATCH), "GradientAccumulation accumulates"),
        (lambda: MixedPrecision(enabled=False), "use to_bf16"),
        (lambda: object.__new__(NonNativeMixedPrecision), "copy of the parameters"),
        (lambda: of_fastai_distributed("DistributedTrainer"), "DistributedTrainer is not verified"),
        (lambda: of_fastai_distributed("ParallelTrainer"), "random numbers are not replayed"),
    ],
)
def test_what_would_go_wrong_is_refused(tmp_path, callback, message):
    made = callback()
    if not isinstance(made, GradientAccumulation):
        made.run = False  # it needs a GPU
    learn, watch = learner(tmp_path, made)
    with pytest.raises(RuntimeError, match=message):
        learn.fit(1)
    assert learn.model.evaluations == 0


class OwnAccumulation(Callback):
    def before_step(self):
        if self.learn.iter % 2 == 0:
            raise CancelBatchException


def test_accumulation_of_ones_own_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="gradients from an earlier batch"):
        fitted(tmp_path, OwnAccumulation())


class Events(Callback):
    run_valid = False

    def __init__(self):
        self.seen = []

    def __call__(self, name):
        self.seen.append(name)


def test_which_events_a_batch_fires_twice(tmp_path):
    events = Events()
    fitted(tmp_path, events, epochs=1)
    second = events.seen[events.seen.index("after_batch") + 1 :]
    batch = second[: second.index("after_batch") + 1]
    twice = ["after_pred", "after_loss", "before_backward", "after_backward", "before_step",
             "after_cancel_step", "after_step"]  # fmt: skip
    once = ["before_batch", "after_batch"]
    assert {name: batch.count(name) for name in batch} == (
        dict.fromkeys(once, 1) | dict.fromkeys(twice, 2)
    )


def test_without_the_callback_or_the_wrapper(tmp_path):
    learn, _ = learner(tmp_path)
    learn.remove_cb(StormCallback)
    with pytest.raises(TypeError, match="needs a closure"):
        learn.fit(1)
    with pytest.raises(TypeError, match=r"OptimWrapper: pass Learner opt_func=storm"):
        fitted(tmp_path, opt_func=partial(OptimWrapper, opt=StormPlus))


def test_predictions_and_validation_need_no_optimizer(tmp_path):
    learn, _ = learner(tmp_path)
    learn.validate()
    predictions, _ = learn.get_preds()
    assert len(predictions) == len(data()[0])


@pytest.mark.long  # a process of its own imports everything anew
def test_the_example_runs():
    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "fastai_learner.py"), "--epochs", "2"],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    assert "42 batches, 83 evaluations, running statistics moved 42 times" in out
