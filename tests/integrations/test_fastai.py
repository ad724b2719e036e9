"""fastai: what only its callbacks do. What trainers share is in `test_trainers.py`."""

import importlib
import warnings
from functools import partial

import pytest
import torch

pytest.importorskip("fastai")

from fastai_cases import Callback, MixedPrecision, Watch, fit, learner
from trainer_cases import (
    BATCHES,
    ROWS,
    assert_same_states,
    hooks_left,
    plain_run,
    warnings_with,
)

from stormplus import SimplifiedStormPlus, StormPlus, Untuned

plain = partial(plain_run, dtype=torch.float32, epochs=1)


def fastai_class(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's own, while it is imported
        return getattr(importlib.import_module(f"fastai.{module}"), name)


def test_the_loss_that_metrics_see_is_the_first_evaluations(tmp_path):
    watch = Watch()
    learner(tmp_path, watch=watch)[0].fit(1)
    losses = plain().losses
    assert watch.seen == [losses[0], *losses[1::2]]


def test_the_papers_lr_is_the_default_and_fit_may_set_another(tmp_path):
    run = fit(tmp_path, epochs=1)
    assert run.learn.lr == run.opt.param_groups[0]["lr"] == 1.0
    learn, run = learner(tmp_path, kind=SimplifiedStormPlus)
    learn.fit(1, lr=0.25, wd=0.01)
    group = run.opt.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.01)


def splitter(model):
    return [list(model.body[:2].parameters()), list(model.body[2:].parameters())]


@pytest.mark.parametrize("verb", ["fit_one_cycle", "fine_tune", "fit_flat_cos"])
@pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
def test_the_main_verbs_train(tmp_path, kind, verb, recwarn):
    learn, run = learner(tmp_path, kind=kind, splitter=splitter, train_bn=False)
    getattr(learn, verb)(1)
    assert len(run.states) == BATCHES * (2 if verb == "fine_tune" else 1)
    momentum = verb != "fit_flat_cos"
    assert len(warnings_with(recwarn, "schedules of a momentum are ignored")) == momentum
    rates = warnings_with(recwarn, "learning rates and their schedules are ignored")
    assert len(rates) == (kind is Untuned)
    if kind is Untuned:
        assert {group["lr"] for group in run.opt.param_groups} == {1.0}


@pytest.mark.parametrize("lr", [0.01, slice(1e-5, 1e-3)])
def test_a_learning_rate_of_untuned_is_ignored_with_a_warning(tmp_path, lr):
    learn, run = learner(tmp_path, kind=Untuned)
    with pytest.warns(UserWarning, match="learning rates and their schedules are ignored"):
        learn.fit(1, lr=lr)
    assert_same_states(run.states, plain(kind=Untuned).states)


@pytest.mark.parametrize("tool", [True, False], ids=["with callback", "without"])
@pytest.mark.filterwarnings(  # fastai leaves its temporary folder behind
    "ignore:learning rates and their schedules", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_the_learning_rate_finder_is_refused(tmp_path, tool):
    learn, _ = learner(tmp_path, kind=Untuned, tool=tool)
    with pytest.raises(RuntimeError, match="no learning rate to find"):
        learn.lr_find()


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("callback.training", "GradientAccumulation", "GradientAccumulation accumulates"),
        ("callback.fp16", "MixedPrecision", "use to_bf16"),
        ("callback.fp16", "NonNativeMixedPrecision", "copy of the parameters"),
        ("distributed", "DistributedTrainer", "DistributedTrainer is not verified"),
        ("distributed", "ParallelTrainer", "they are not replayed"),
    ],
)
def test_what_would_be_wrong_is_refused(tmp_path, module, name, message):
    kind = fastai_class(module, name)
    if name == "GradientAccumulation":
        callback = kind(2 * ROWS)
    elif kind is MixedPrecision:
        callback = kind(enabled=False)
    else:
        callback = object.__new__(kind)
    callback.run = name == "GradientAccumulation"  # the others need a GPU
    learn, _ = learner(tmp_path, callback)
    with pytest.raises(RuntimeError, match=message):
        learn.fit(1)
    assert learn.model.evaluations == 0


def test_accumulation_by_cancelling_batches_is_refused(tmp_path):
    class Accumulates(Callback):
        def before_step(self):
            if self.learn.iter % 2 == 0:
                raise fastai_class("callback.core", "CancelBatchException")

    with pytest.raises(RuntimeError, match="gradients from an earlier batch"):
        fit(tmp_path, Accumulates())


def test_without_the_wrapper(tmp_path):
    learn, _ = learner(
        tmp_path, wrapper=partial(fastai_class("optimizer", "OptimWrapper"), opt=StormPlus)
    )
    with pytest.raises(TypeError, match=r"pass Learner opt_func=opt_func"):
        learn.fit(1)


@pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
def test_predictions_and_validation_need_no_optimizer(tmp_path, kind):
    learn, _ = learner(tmp_path, kind=kind)
    learn.remove_cb(Watch)
    learn.validate()
    predictions, _ = learn.get_preds()
    assert len(predictions) == BATCHES * ROWS
    assert learn.opt is None


def test_which_events_a_batch_fires_twice(tmp_path):
    seen = []

    class Events(Callback):
        run_valid = False

        def __call__(self, name):
            seen.append(name)

    fit(tmp_path, Events(), epochs=1)
    second = seen[seen.index("after_batch") + 1 :]
    batch = second[: second.index("after_batch") + 1]
    twice = ["after_pred", "after_loss", "before_backward", "after_backward", "before_step",
             "after_cancel_step", "after_step"]  # fmt: skip
    counts = dict.fromkeys(["before_batch", "after_batch"], 1) | dict.fromkeys(twice, 2)
    assert {name: batch.count(name) for name in batch} == counts


@pytest.mark.parametrize(("evaluation", "moves"), [(2, False), (3, True)])
def test_a_batch_cancelled_halfway_is_dropped(tmp_path, evaluation, moves):
    class Cancel(Callback):
        order, run_valid, left = 500, False, evaluation

        def before_step(self):
            self.left -= 1
            if self.left == 0:
                raise fastai_class("callback.core", "CancelBatchException")

        def after_cancel_batch(self):
            self.learn.opt.zero_grad()

    # Evaluation 1 is the first sample, 2 and 3 are the second's.
    run = fit(tmp_path, Cancel(), epochs=1)
    first, second = run.states[:2]
    assert torch.equal(first["body.0.weight"], second["body.0.weight"]) != moves
    assert run.opt.diagnostics()["step"] == BATCHES - 1
    assert not hooks_left(run.opt)


@pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
def test_a_fit_that_fails_leaves_a_learner_that_goes_on(tmp_path, kind):
    run = fit(tmp_path, kind=kind, epochs=1)
    run.net.fails_at = run.net.evaluations + 4
    with pytest.raises(OSError, match="a broken disc"):
        run.learn.fit(1)
    run.learn.opt.zero_grad()
    before = run.opt.diagnostics()["step"]
    run.learn.fit(1)
    assert run.opt.diagnostics()["step"] == before + BATCHES
    assert not run.net._forward_pre_hooks


@pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
def test_freezing_starts_over(tmp_path, kind):
    learn, run = learner(tmp_path, kind=kind, splitter=splitter, train_bn=False)
    learn.freeze()
    learn.fit(1)
    assert torch.equal(run.states[0]["body.0.weight"], run.states[-1]["body.0.weight"])
    learn.unfreeze()
    assert run.opt.diagnostics()["step"] == 0
    learn.fit(1)
    assert run.opt.grad_evaluations == (2 * BATCHES - 1 if kind is StormPlus else BATCHES)


def test_export_keeps_the_state(tmp_path):
    watch = Watch()
    learn, run = learner(tmp_path, watch=watch)
    learn.fit(1)
    learn.remove_cb(watch)
    learn.export("learner.pkl")
    learn.add_cb(Watch(run, BATCHES))
    learn.fit(1)
    assert_same_states(run.states, plain(epochs=2).states)
