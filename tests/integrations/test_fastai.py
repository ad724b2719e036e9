"""fastai: what only its callbacks do. What trainers share is in `test_trainers.py`."""

from functools import partial

import pytest
import torch
from tests.support import trainer_cases
from tests.support.fastai_cases import AMPMode, Callback, Watch, again, fastai
from tests.support.trainer_cases import (
    BATCHES,
    ROWS,
    Run,
    assert_same_states,
    plain_run,
    warnings_with,
)

from stormplus import SimplifiedStormPlus, StormPlus, Untuned

fit = partial(trainer_cases.fit, "fastai")
plain = partial(plain_run, dtype=torch.float32)
KINDS = pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
TWICE_BUT_ONCE = 2 * BATCHES - 1


def split(net):
    return [list(net.body[:2].parameters()), list(net.body[2:].parameters())]


def test_the_papers_lr_is_the_default_and_fit_may_set_another():
    run = fit(kind=SimplifiedStormPlus)
    assert run.learn.lr == run.opt.param_groups[0]["lr"] == 1.0
    run.learn.fit(1, lr=0.25, wd=0.01)
    group = run.opt.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.01)


@pytest.mark.parametrize("name", ["fit_one_cycle", "fine_tune", "fit_flat_cos"])
@KINDS
def test_the_main_verbs_train(kind, name, recwarn):
    def verb(learn):
        getattr(learn, name)(1)

    run = fit(kind=kind, splitter=split, train_bn=False, verb=verb)
    assert len(run.states) == BATCHES * (2 if name == "fine_tune" else 1)
    momentum = name != "fit_flat_cos"
    assert len(warnings_with(recwarn, "schedules of a momentum are ignored")) == momentum
    rates = warnings_with(recwarn, "learning rates and their schedules are ignored")
    assert len(rates) == (kind is Untuned)
    if kind is Untuned:
        assert {group["lr"] for group in run.opt.param_groups} == {1.0}


@pytest.mark.parametrize("tool", [True, False], ids=["with callback", "without"])
@pytest.mark.filterwarnings(  # fastai leaves its temporary folder behind
    "ignore:learning rates and their schedules", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_the_learning_rate_finder_is_refused(tmp_path, tool):
    with pytest.raises(RuntimeError, match="no learning rate to find"):
        fit(tmp_path, kind=Untuned, tool=tool, verb=lambda learn: learn.lr_find())


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (fastai.callback.training.GradientAccumulation, "use larger batches"),
        (fastai.callback.fp16.MixedPrecision, "to_bf16"),
        (fastai.callback.fp16.NonNativeMixedPrecision, "to_bf16"),
        (fastai.distributed.DistributedTrainer, "DistributedDataParallel"),
        (fastai.distributed.ParallelTrainer, "DistributedDataParallel"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_would_be_wrong_is_refused(kind, advice):
    callback = object.__new__(kind)
    callback.run, callback.amp_mode = False, AMPMode.FP16  # most need a GPU
    with pytest.raises(RuntimeError, match=f"cannot take two gradients: .*{advice}"):
        fit(None, callback)


def test_accumulation_by_cancelling_batches_is_refused():
    class Accumulates(Callback):
        def before_step(self):
            if self.learn.iter % 2 == 0:
                raise fastai.callback.core.CancelBatchException

    with pytest.raises(RuntimeError, match="gradients from an earlier batch"):
        fit(None, Accumulates())


def test_fastais_own_wrapper_is_refused():
    wrapper = partial(fastai.optimizer.OptimWrapper, opt=StormPlus)
    with pytest.raises(TypeError, match=r"pass Learner opt_func=opt_func"):
        fit(opt_func=wrapper)


def test_weights_that_another_callback_writes_in_its_after_step_restart_the_estimator():
    class Writes(Callback):
        @torch.no_grad()
        def after_step(self):
            if self.learn.iter == 2:
                self.learn.model.body[0].weight.mul_(2)

    assert fit(None, Writes(), epochs=1).opt.grad_evaluations == TWICE_BUT_ONCE - 1


@KINDS
def test_predictions_and_validation_need_no_optimizer(kind):
    def verb(learn):
        learn.remove_cb(Watch)
        learn.validate()
        predictions, _ = learn.get_preds()
        assert len(predictions) == BATCHES * ROWS
        assert learn.opt is None

    fit(kind=kind, verb=verb)


@pytest.mark.parametrize("evaluation", [4, 5])  # the first and the second of the third batch
@KINDS
def test_a_fit_that_fails_leaves_a_learner_that_goes_on(kind, evaluation):
    run = Run()
    with pytest.raises(OSError, match="a broken disc"):
        fit(kind=kind, fails_at=evaluation, run=run)
    run.learn.opt.zero_grad()
    before = run.opt.diagnostics()["step"]
    again(run)
    assert run.opt.diagnostics()["step"] == before + 2 * BATCHES
    assert not run.net._forward_pre_hooks


@KINDS
def test_freezing_starts_over(kind):
    def verb(learn):
        learn.freeze()
        learn.fit(1)
        learn.unfreeze()
        assert learn.opt.opt.diagnostics()["step"] == 0
        learn.fit(1)

    run = fit(kind=kind, splitter=split, train_bn=False, verb=verb)
    frozen = run.states[:BATCHES]
    assert torch.equal(frozen[0]["body.0.weight"], frozen[-1]["body.0.weight"])
    assert run.opt.grad_evaluations == (TWICE_BUT_ONCE if kind is StormPlus else BATCHES)


def test_export_keeps_the_state(tmp_path):
    def verb(learn):
        learn.fit(1)
        watch = learn.watch
        learn.remove_cb(watch)
        learn.export("learner.pkl")
        learn.add_cb(watch)
        learn.fit(1)

    assert_same_states(fit(tmp_path, verb=verb).states, plain().states)
