"""fastai: what only its callback does. What trainers share is in `test_trainers.py`."""

import copy
import importlib
import warnings
from functools import partial

import pytest
import torch

pytest.importorskip("fastai")

from fastai_cases import (
    Callback,
    CancelBatchException,
    GradientAccumulation,
    MixedPrecision,
    NonNativeMixedPrecision,
    OptimWrapper,
    SaveModelCallback,
    UntunedCallback,
    UntunedWatch,
    Watch,
    fit,
    learner,
    ours,
    untuned,
)
from trainer_cases import (
    BATCHES,
    ROWS,
    SAMPLES,
    assert_at_average,
    assert_same_states,
    data,
    hooks_left,
    network,
    plain_run,
    snapshot,
    untuned_run,
)

from stormplus import SimplifiedStormPlus, StormPlus, Untuned, recalibrate

plain = partial(plain_run, dtype=torch.float32)


def test_the_loss_that_metrics_see_is_the_first_evaluations(tmp_path):
    watch = Watch()
    learn, _ = learner(tmp_path, watch=watch)
    learn.fit(1)
    losses = plain(epochs=1).losses
    assert watch.seen == [losses[0], *losses[1::2]]


def test_the_papers_lr_is_the_default_and_fit_may_set_another(tmp_path):
    run = fit(tmp_path, epochs=1)
    assert run.learn.lr == run.opt.param_groups[0]["lr"] == 1.0
    learn, run = learner(tmp_path, opt_func=ours(SimplifiedStormPlus, norm="mean"))
    learn.fit(1, lr=0.25, wd=0.01)
    group = run.opt.param_groups[0]
    assert type(run.opt) is SimplifiedStormPlus
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.01)


def test_schedules_of_a_momentum_are_refused(tmp_path):
    learn, _ = learner(tmp_path)
    with pytest.raises(ValueError, match=r"no hyper-parameter 'mom'.*fit_flat_cos"):
        learn.fit_one_cycle(1)


def of_fastai_distributed(name):
    pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fastai's own, while it is imported
        module = importlib.import_module("fastai.distributed")
    return object.__new__(getattr(module, name))


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: GradientAccumulation(2 * ROWS), "GradientAccumulation accumulates"),
        (lambda: MixedPrecision(enabled=False), "use to_bf16"),
        (lambda: object.__new__(NonNativeMixedPrecision), "copy of the parameters"),
        (lambda: of_fastai_distributed("DistributedTrainer"), "DistributedTrainer is not verified"),
        (lambda: of_fastai_distributed("ParallelTrainer"), "random numbers are not replayed"),
    ],
    ids=["accumulation", "fp16", "non-native fp16", "distributed", "parallel"],
)
def test_what_would_go_wrong_is_refused(tmp_path, callback, message):
    made = callback()
    if not isinstance(made, GradientAccumulation):
        made.run = False  # it needs a GPU
    learn, _ = learner(tmp_path, made)
    with pytest.raises(RuntimeError, match=message):
        learn.fit(1)
    assert learn.model.evaluations == 0


class OwnAccumulation(Callback):
    def before_step(self):
        if self.learn.iter % 2 == 0:
            raise CancelBatchException


def test_accumulation_of_ones_own_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="gradients from an earlier batch"):
        fit(tmp_path, OwnAccumulation())


class Events(Callback):
    run_valid = False

    def __init__(self):
        self.seen = []

    def __call__(self, name):
        self.seen.append(name)


def test_which_events_a_batch_fires_twice(tmp_path):
    events = Events()
    fit(tmp_path, events, epochs=1)
    second = events.seen[events.seen.index("after_batch") + 1 :]
    batch = second[: second.index("after_batch") + 1]
    twice = ["after_pred", "after_loss", "before_backward", "after_backward", "before_step",
             "after_cancel_step", "after_step"]  # fmt: skip
    once = ["before_batch", "after_batch"]
    assert {name: batch.count(name) for name in batch} == (
        dict.fromkeys(once, 1) | dict.fromkeys(twice, 2)
    )


def test_without_the_wrapper(tmp_path):
    with pytest.raises(TypeError, match=r"OptimWrapper: pass Learner opt_func=opt_func"):
        fit(tmp_path, opt_func=partial(OptimWrapper, opt=StormPlus))


def test_predictions_and_validation_need_no_optimizer(tmp_path):
    learn, _ = learner(tmp_path)
    learn.validate()
    predictions, _ = learn.get_preds()
    assert len(predictions) == len(data()[0])


# -- runs that are loaded, cancelled, frozen, and go on ------------------------------------------


def test_a_state_that_cannot_be_loaded_is_not_forgotten(tmp_path):
    fit(tmp_path, epochs=1).learn.save("half")
    second, _ = learner(tmp_path, opt_func=ours(SimplifiedStormPlus))
    with pytest.warns(UserWarning, match="Could not load the optimizer state"):
        second.load("half")
    with pytest.raises(RuntimeError, match=r"not the optimizer's state.*rule"):
        second.fit(1)
    second.opt.clear_state()
    second.fit(1)


def test_the_best_weights_restart_the_estimator(tmp_path):
    # ends with the best weights loaded, the optimizer's state not
    run = fit(tmp_path, SaveModelCallback(monitor="train_loss"), epochs=1)
    before = run.opt.diagnostics()
    run.learn.remove_cb(SaveModelCallback)
    run.learn.fit(1)
    after = run.opt.diagnostics()
    assert after["step"] == before["step"] + BATCHES
    assert after["grad_evaluations"] == before["grad_evaluations"] + 2 * BATCHES - 1


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
    learn, run = learner(tmp_path, clip)
    with pytest.raises(RuntimeError, match=r"writes to the parameters at every batch.*Remove"):
        learn.fit(1)
    clip.on = False
    learn.opt.zero_grad()
    before = run.opt.diagnostics()["step"]
    learn.fit(1)  # goes on once the cause is gone
    assert run.opt.diagnostics()["step"] == before + BATCHES


class Cancel(Callback):
    order, run_valid = 500, False

    def __init__(self, evaluation):
        self.left = evaluation

    def before_step(self):
        self.left -= 1
        if self.left == 0:
            raise CancelBatchException

    def after_cancel_batch(self):
        self.learn.opt.zero_grad()


@pytest.mark.parametrize(("evaluation", "moves"), [(2, False), (3, True)])
def test_a_batch_cancelled_halfway_is_dropped(tmp_path, evaluation, moves):
    # Evaluation 1 is the first sample, 2 and 3 are the second's.
    run = fit(tmp_path, Cancel(evaluation), epochs=1)
    first, second = run.states[:2]
    assert torch.equal(first["body.0.weight"], second["body.0.weight"]) != moves
    assert run.opt.diagnostics()["step"] == BATCHES - 1
    assert not hooks_left(run.opt)


class Fail(Callback):
    order, run_valid, armed = 500, False, True

    def before_step(self):
        if self.learn.opt.opt.pending and self.armed:
            self.armed = False
            raise ZeroDivisionError("of the user's")


def test_an_exception_halfway_leaves_a_learner_that_goes_on(tmp_path):
    learn, run = learner(tmp_path, Fail())
    with pytest.raises(ZeroDivisionError):
        learn.fit(1)
    learn.opt.zero_grad()
    learn.fit(1)
    assert run.opt.diagnostics()["step"] == 1 + BATCHES
    assert not hooks_left(run.opt)


@pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)
def test_freezing_begins_anew(tmp_path, kind):
    def splitter(model):
        return [list(model.body[:2].parameters()), list(model.body[2:].parameters())]

    own = [] if kind is StormPlus else [UntunedCallback()]
    learn, run = learner(
        tmp_path, *own, splitter=splitter, train_bn=False, opt_func=ours(kind), tool=not own
    )
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
    assert_same_states(run.states, plain().states)
    assert run.opt.diagnostics()["step"] == SAMPLES


def test_a_copy_of_the_optimizer_goes_on(tmp_path):
    learn = fit(tmp_path, epochs=1).learn
    wrapper = copy.deepcopy(learn.opt)
    assert wrapper.opt.state.keys().isdisjoint(learn.opt.opt.state)
    wrapper.point.restart_if_moved(wrapper.opt)
    assert wrapper.opt.started


# -- Untuned: the average, and no learning rate --------------------------------------------------

FORGOTTEN = "holds the iterate of Untuned"


def told(recwarn, text):
    return [str(w.message) for w in recwarn if text in str(w.message)]


def test_without_its_callback_the_iterate_is_saved_and_one_warning_says_so(tmp_path, recwarn):
    """What the callback is for."""
    run = untuned(tmp_path, callback=[])
    (text,) = told(recwarn, FORGOTTEN)
    assert text.endswith("UntunedCallback from stormplus.integrations.fastai")
    for step, state in (*run.saved.items(), *run.validated.items()):
        assert torch.equal(state["body.0.weight"], run.states[step - 1]["body.0.weight"])


def test_with_its_callback_nothing_is_said_and_a_learner_of_others_is_left_alone(tmp_path, recwarn):
    run = untuned(tmp_path)
    assert any(isinstance(callback, UntunedWatch) for callback in run.learn.cbs)
    fit(tmp_path, epochs=1)
    assert not told(recwarn, FORGOTTEN)


@pytest.mark.parametrize("how", ["opt_func", "fit", "fit_flat_cos"])
def test_a_learning_rate_is_ignored_with_a_warning(tmp_path, how):
    ignored = pytest.warns(UserWarning, match=r"lr=0.01 is ignored: Untuned .*pass 1.0")
    if how == "opt_func":
        with ignored as seen:
            made = ours(Untuned, lr=0.01)
        learn, run = learner(tmp_path, UntunedCallback(), tool=False, opt_func=made)
        learn.fit(1)
    else:
        learn, run = learner(tmp_path, UntunedCallback(), tool=False, opt_func=ours(Untuned))
        learn.create_opt()
        with ignored as seen:
            getattr(learn, how)(1, lr=0.01)
    assert len([w for w in seen if "is ignored" in str(w.message)]) == 1
    if how != "fit_flat_cos":
        assert run.opt.param_groups[0]["lr"] == 1.0
        assert_same_states(run.states, untuned_run(epochs=1, dtype=torch.float32).states)
    else:  # flat at 1.0, then down
        assert learn.recorder.lrs[0] == 1.0
        assert 0 < learn.recorder.lrs[-1] < 1


def test_the_best_weights_are_begun_from_anew(tmp_path):
    learn, run = learner(tmp_path, UntunedCallback(), tool=False, opt_func=ours(Untuned))
    learn.fit(1)
    learn.save("first", with_opt=False)
    learn.fit(1)
    learn.load("first", with_opt=False)
    plain = untuned_run(epochs=1, dtype=torch.float32)
    assert_at_average(snapshot(learn.model), plain.averages[-1], plain.states[-1])
    begun = []
    run.opt.register_step_pre_hook(lambda *_: begun.append(snapshot(learn.model)))
    with pytest.warns(UserWarning, match="without the state of Untuned: it begins anew"):
        learn.fit(1)
    assert_at_average(begun[0], plain.averages[-1], plain.states[-1])
    assert run.opt.diagnostics()["step"] == BATCHES


def test_the_best_weights_that_are_the_last_end_nothing(tmp_path):
    learn, run = learner(tmp_path, UntunedCallback(), tool=False, opt_func=ours(Untuned))
    learn.fit(1)
    learn.load(learn.save("last", with_opt=False).stem, with_opt=False)
    learn.fit(1)
    assert run.opt.diagnostics()["step"] == 2 * BATCHES
    assert_same_states(run.states, untuned_run(epochs=2, dtype=torch.float32).states)


def test_running_statistics_are_taken_anew_over_the_last_batches(tmp_path):
    run = untuned(tmp_path, callback=[UntunedCallback(recalibrate_batches=4)])
    net = network(torch.float32)
    net.load_state_dict(run.saved[SAMPLES])
    recalibrate(net, data(dtype=torch.float32)[0].split(ROWS)[2:])
    for state in (snapshot(run.net), run.validated[SAMPLES], run.saved[SAMPLES]):
        for name in ("body.1.running_mean", "body.1.running_var"):
            torch.testing.assert_close(state[name], net.state_dict()[name])
    assert run.net.evaluations == SAMPLES


def test_a_learner_that_only_evaluates_needs_no_optimizer(tmp_path):
    learn, _ = learner(tmp_path, UntunedCallback(), tool=False, opt_func=ours(Untuned))
    before = learn.validate()
    assert learn.opt is None
    learn.fit(1)
    assert learn.validate() != before


@pytest.mark.parametrize("ends", ["in a batch", "before the first"])
def test_a_learning_rate_is_ignored_after_a_fit_that_has_failed(tmp_path, ends):
    run = fit(tmp_path, UntunedCallback(), kind=Untuned, epochs=1)
    if ends == "in a batch":
        run.net.fails_at = BATCHES + 3
        with pytest.raises(OSError, match="a broken disc"):
            run.learn.fit(1)
    else:
        with pytest.raises(ValueError, match="sets its momentum itself"):
            run.learn.fit_one_cycle(1)
    with pytest.warns(UserWarning, match=r"lr=0.01 is ignored"):
        run.learn.fit(1, lr=0.01)
    assert run.opt.param_groups[0]["lr"] == 1.0


def test_the_callback_of_untuned_refuses_others(tmp_path):
    with pytest.raises(TypeError, match=r"is for Untuned, got StormPlus: pass Learner opt_func"):
        fit(tmp_path, UntunedCallback(), tool=False)


def test_a_fit_that_fails_leaves_a_learner_that_goes_on(tmp_path):
    run = fit(tmp_path, UntunedCallback(), kind=Untuned, epochs=1)
    run.net.fails_at = BATCHES + 3
    with pytest.raises(OSError, match="a broken disc"):
        run.learn.fit(1)
    run.learn.fit(1)
    assert run.opt.grad_evaluations == 2 * BATCHES + 2
    assert not run.net._forward_pre_hooks
