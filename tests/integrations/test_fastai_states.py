"""fastai: runs that are saved, loaded, cancelled, frozen, and go on."""

import copy
import importlib
import sys

import pytest
import torch
from fastai_runs import (
    EPOCHS,
    SAMPLES,
    Callback,
    CancelBatchException,
    SaveModelCallback,
    Watch,
    fitted,
    learner,
    storm,
)
from plain_loop import assert_same_runs

from stormplus import SimplifiedStormPlus

# fastai's own, from learn.load
pytestmark = pytest.mark.filterwarnings("ignore:numpy.core is deprecated:DeprecationWarning")


def test_save_and_load_go_on_bit_by_bit(tmp_path):
    _, whole = fitted(tmp_path)
    first, start = fitted(tmp_path, epochs=1)
    first.save("half")
    second, watch = learner(tmp_path, first=len(start))
    second.load("half")
    second.fit(1)
    assert_same_runs(start + watch.snapshots, whole)
    assert second.opt.opt.diagnostics()["grad_evaluations"] == 2 * SAMPLES - 1


def test_fit_again_goes_on(tmp_path):
    _, whole = fitted(tmp_path)
    learn, watch = learner(tmp_path)
    learn.fit(1)
    learn.fit(1)
    assert_same_runs(watch.snapshots, whole)


def test_a_state_that_cannot_be_loaded_is_not_forgotten(tmp_path):
    first, _ = fitted(tmp_path, epochs=1)
    first.save("half")
    second, _ = learner(tmp_path, opt_func=storm(SimplifiedStormPlus))
    with pytest.warns(UserWarning, match="Could not load the optimizer state"):
        second.load("half")
    with pytest.raises(RuntimeError, match=r"not the optimizer's state.*rule"):
        second.fit(1)
    second.opt.clear_state()
    second.fit(1)


def test_loaded_weights_restart_the_estimator(tmp_path):
    learn, _ = learner(tmp_path, SaveModelCallback(monitor="train_loss"))
    learn.fit(1)  # ends with the best weights loaded, the optimizer's state not
    before = learn.opt.opt.diagnostics()
    learn.remove_cb(SaveModelCallback)
    learn.fit(1)
    after = learn.opt.opt.diagnostics()
    assert after["step"] == before["step"] + SAMPLES // 2
    assert after["grad_evaluations"] == before["grad_evaluations"] + 2 * (SAMPLES // 2) - 1


class Clip(Callback):
    """Clips the weights at one event of every batch, as long as it is on."""

    order, run_valid, on = 500, False, True

    def __init__(self, event):
        self.event = event

    def __call__(self, name):
        if name == self.event and self.on and self.learn.training:
            with torch.no_grad():
                for p in self.learn.model.parameters():
                    p.clamp_(-0.5, 0.5)


@pytest.mark.parametrize("event", ["before_batch", "after_step", "after_batch"])
def test_writing_to_the_weights_at_every_batch_is_refused(tmp_path, event):
    clip = Clip(event)
    learn, _ = learner(tmp_path, clip)
    with pytest.raises(RuntimeError, match=r"writes to the parameters at every batch.*Remove"):
        learn.fit(1)
    clip.on = False
    learn.opt.zero_grad()
    before = learn.opt.opt.diagnostics()["step"]
    learn.fit(1)  # goes on once the cause is gone
    assert learn.opt.opt.diagnostics()["step"] == before + SAMPLES // EPOCHS


class Cancel(Callback):
    order, run_valid = 500, False

    def __init__(self, evaluation):
        self.left = evaluation

    def before_step(self):
        self.left -= 1
        if self.left == 0:
            raise CancelBatchException


@pytest.mark.parametrize(("evaluation", "steps"), [(2, 0), (3, 1)])
def test_a_batch_cancelled_halfway_is_dropped(tmp_path, evaluation, steps):
    # Evaluation 1 is the first sample, 2 and 3 are the second's.
    class Clean(Callback):
        def after_cancel_batch(self):
            self.learn.opt.zero_grad()

    learn, run = fitted(tmp_path, Cancel(evaluation), Clean(), epochs=1)
    moved = not torch.equal(run[0]["body.0.weight"], run[1]["body.0.weight"])
    assert moved == bool(steps)
    assert learn.opt.opt.diagnostics()["step"] == SAMPLES // EPOCHS - 1
    # The sample that follows a lost pair takes one evaluation.
    assert learn.opt.opt._samples == []


class Fail(Callback):
    order, run_valid = 500, False
    armed = True

    def before_step(self):
        if self.learn.opt.opt.pending and self.armed:
            self.armed = False
            raise ZeroDivisionError("of the user's")


def test_an_exception_halfway_leaves_a_learner_that_goes_on(tmp_path):
    learn, _ = learner(tmp_path, Fail())
    with pytest.raises(ZeroDivisionError):
        learn.fit(1)
    learn.opt.zero_grad()
    learn.fit(1)
    assert learn.opt.opt.diagnostics()["step"] == 1 + SAMPLES // EPOCHS
    assert learn.opt.opt._samples == []


def test_freezing_begins_anew(tmp_path):
    def splitter(model):
        return [list(model.body[:2].parameters()), list(model.body[2:].parameters())]

    learn, watch = learner(tmp_path, splitter=splitter, train_bn=False)
    learn.freeze()
    learn.fit(1)
    assert torch.equal(watch.snapshots[0]["body.0.weight"], watch.snapshots[-1]["body.0.weight"])
    learn.unfreeze()
    assert learn.opt.opt.diagnostics()["step"] == 0
    learn.fit(1)
    assert learn.opt.opt.diagnostics()["grad_evaluations"] == SAMPLES - 1


def test_export_keeps_the_state(tmp_path):
    _, whole = fitted(tmp_path)
    learn, watch = learner(tmp_path)
    learn.fit(1)
    kept = watch.snapshots
    learn.remove_cb(watch)
    learn.export("learner.pkl")
    again = Watch(len(kept))
    learn.add_cb(again)
    learn.fit(1)
    assert_same_runs(kept + again.snapshots, whole)


def test_a_copy_of_the_optimizer_goes_on(tmp_path):
    learn, _ = fitted(tmp_path, epochs=1)
    wrapper = copy.deepcopy(learn.opt)
    assert wrapper.opt.state.keys().isdisjoint(learn.opt.opt.state)
    wrapper.point.settle(wrapper.opt)
    assert wrapper.opt.started


def test_a_missing_package_is_named(monkeypatch):
    name = storm.__module__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastai.callback.core", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'stormplus\[fastai\]'"):
        importlib.import_module(name)
