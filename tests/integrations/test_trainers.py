"""Every trainer, every property that they share: a run is the plain loop's, to the bit."""

import importlib.util
import sys

import pytest
import torch
from tests.support.pages import run_example
from tests.support.trainer_cases import (
    BATCHES,
    EPOCHS,
    FLOAT32_ONLY,
    ROWS,
    SAMPLES,
    Run,
    adapter,
    assert_at_average,
    assert_same_runs,
    assert_same_states,
    data,
    fit,
    hooks_left,
    network,
    plain_run,
    snapshot,
    untuned_run,
    warnings_with,
)

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned, recalibrate
from stormplus.integrations.untuned import Average
from stormplus.torch import PairedOptimizer

PACKAGES = {
    "lightning": "lightning.pytorch",
    "huggingface": "transformers",
    "accelerate": "accelerate",
    "fastai": "fastai.callback.core",
    "keras": "keras",
    "skorch": "skorch",
}
CLIPPING = "two gradients of a sample separately"
ITERATE = "the iterate of Untuned"
STATISTICS = "body.1.num_batches_tracked"
KINDS = pytest.mark.parametrize("kind", [StormPlus, Untuned], ids=lambda kind: kind.__name__)


def trainers(*names):
    return pytest.mark.parametrize("name", names or tuple(PACKAGES), indirect=True)


KEEP_THEIR_OPTIMIZER = trainers("huggingface", "fastai", "keras", "skorch")  # for a second fit


def skip_unless_installed(package):
    if importlib.util.find_spec(package.split(".")[0]) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def name(request):
    skip_unless_installed(PACKAGES[request.param])
    return request.param


@pytest.fixture
def dtype(name):
    return torch.float32 if name in FLOAT32_ONLY else torch.float64


# -- the plain loop's run ------------------------------------------------------------------------


def falls(step):
    return 1.0 if step < 5 else 0.25


ALL = tuple(PACKAGES)
PROCESS = ("lightning", "huggingface", "accelerate", "fastai", "skorch")  # cast and clip
REPLAYED = ("lightning", "huggingface", "accelerate")
FP16 = {"half": torch.float16, "dtype": torch.float32}
RUNS = {  # settings, and the trainers that have them
    "StormPlus": ({"lr": 0.5, "schedule": falls}, ALL),
    "SimplifiedStormPlus": ({"kind": SimplifiedStormPlus, "lr": 0.5, "schedule": falls}, ALL),
    "Storm": ({"kind": Storm, "lr": 0.5, "schedule": falls}, ALL),
    "bf16": ({"half": torch.bfloat16, "dtype": torch.float32}, PROCESS),
    "clipped": ({"clip": 0.05}, PROCESS),
    "accumulated": ({"accumulate": 4}, (*REPLAYED, "skorch")),  # 4 and 2 micro-batches
    "fp16, clipped": ({"scale": 2.0**10, "clip": 0.5, **FP16}, REPLAYED),
    "fp16, accumulated": ({"scale": 2.0**10, "accumulate": 2, **FP16}, REPLAYED),
    "fp16, overflows": ({"scale": 2.0**22, **FP16}, REPLAYED),
    "fp16, overflows, clipped": ({"scale": 2.0**22, "clip": 0.5, **FP16}, REPLAYED),
    "Untuned, accumulated": ({"kind": Untuned, "accumulate": 2}, REPLAYED),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, id=f"{name}-{what}")
        for what, (settings, names) in RUNS.items()
        for name in names
    ],
    indirect=["name"],
)
def test_the_run_is_the_plain_loops(name, dtype, settings, tmp_path, recwarn):
    settings = {"dtype": dtype, "accumulate": 1, **settings}
    run = fit(name, tmp_path, **settings)
    divisor = settings["accumulate"] if name == "lightning" else None  # for short samples too
    plain = plain_run(divisor=divisor, **settings)
    assert_same_runs(run, plain)
    assert len(warnings_with(recwarn, CLIPPING)) == ("clip" in settings and name in REPLAYED)
    taken, samples = run.opt.diagnostics()["step"], -(-BATCHES // settings["accumulate"]) * EPOCHS
    overflows = settings.get("scale") == 2.0**22
    assert 1 < taken < samples if overflows else taken == samples
    assert run.states[-1][STATISTICS] == (taken if overflows else SAMPLES)  # once per batch
    if "scale" in settings:
        assert run.scaler.get_scale() == plain.scaler.get_scale()
    if issubclass(settings.get("kind", StormPlus), PairedOptimizer):
        assert not hooks_left(run.opt)
        if name == "accelerate":  # a scheduler steps with the optimizer
            assert run.scheduler.last_epoch == taken


@trainers("fastai", "keras", "lightning", "skorch")
def test_the_loss_of_a_batch_is_that_of_its_first_evaluation(name, dtype, tmp_path):
    losses = plain_run(epochs=1, dtype=dtype).losses
    reported = fit(name, tmp_path, epochs=1).losses
    assert reported == pytest.approx([losses[0], *losses[1::2]], rel=1e-5)


@KINDS
@trainers()
def test_a_run_in_two_parts_is_the_whole_run(name, dtype, tmp_path, kind):
    first = fit(name, tmp_path, kind=kind, epochs=1, watch=True)
    second = fit(name, tmp_path, kind=kind, resume=True, watch=True)
    whole = plain_run(kind=kind, dtype=dtype)
    assert_same_states(first.states + second.states, whole.states)
    assert second.opt.diagnostics() == whole.opt.diagnostics()


# -- Untuned -------------------------------------------------------------------------------------


@trainers()
def test_what_is_validated_saved_and_left_is_the_average(name, dtype, tmp_path, recwarn):
    run = fit(name, tmp_path, kind=Untuned, watch=True)
    plain = untuned_run(dtype=dtype)
    assert_same_runs(run, plain)  # the iterates are those of a loop that never evaluates
    assert run.net.evaluations == run.opt.grad_evaluations == SAMPLES
    assert run.validated.keys() == {BATCHES, SAMPLES}
    assert {BATCHES, SAMPLES} <= run.saved.keys()
    assert run.opt.at_average
    for found in (run.validated, run.saved, {SAMPLES: snapshot(run.net)}):
        for step, state in found.items():
            assert_at_average(state, plain, step)
    assert not warnings_with(recwarn, ITERATE)


@trainers("lightning", "huggingface", "accelerate", "fastai")
def test_without_the_callback_one_warning_says_so(name, tmp_path, recwarn):
    fit(name, tmp_path, kind=Untuned, tool=False, watch=True)
    (text,) = warnings_with(recwarn, ITERATE)
    assert "stormplus.integrations." in text


@trainers("fastai", "keras", "skorch")
def test_a_learning_rate_of_untuned_is_ignored_with_a_warning(name, dtype, tmp_path):
    with pytest.warns(UserWarning, match="ignored"):
        run = fit(name, tmp_path, kind=Untuned, lr=0.01)
    assert_same_states(run.states, plain_run(kind=Untuned, dtype=dtype).states)


@trainers("lightning", "huggingface", "accelerate", "keras", "skorch")
def test_a_falling_learning_rate_warns_at_once_but_a_warm_up_does_not(name, tmp_path):
    def falls(step):
        return max(0.0, 1.0 - step / 9)

    fit(name, tmp_path, kind=Untuned, watch=True, schedule=lambda step: min(1.0, step / 6))
    run, folder = Run(), tmp_path / "falls"
    folder.mkdir()
    with pytest.raises(UserWarning, match="learning rate of Untuned falls"):  # an error in tests
        fit(name, folder, kind=Untuned, schedule=falls, run=run)
    assert len(run.states) <= 2
    with pytest.warns(UserWarning, match="learning rate of Untuned falls") as warned:
        fit(name, folder, kind=Untuned, schedule=falls)
    assert len(warnings_with(warned, "falls")) == 1


@trainers("lightning", "huggingface", "accelerate", "fastai")
def test_running_statistics_are_recomputed_over_the_last_batches(name, dtype, tmp_path):
    run = fit(name, tmp_path, kind=Untuned, watch=True, recalibrate_batches=4)
    plain = untuned_run(dtype=dtype)
    for key in plain.averages[0]:  # no weight moved
        assert torch.equal(run.states[-1][key], plain.states[-1][key])
    net = network(dtype)
    net.load_state_dict(run.saved[SAMPLES])
    recalibrate(net, data(dtype=dtype)[0].split(ROWS)[2:])
    for state in (snapshot(run.net), run.validated[SAMPLES], run.saved[SAMPLES]):
        for key in ("body.1.running_mean", "body.1.running_var"):
            torch.testing.assert_close(state[key], net.state_dict()[key])


@trainers("keras", "skorch")
def test_evaluating_in_the_middle_of_an_epoch_shows_the_average(name, dtype, tmp_path):
    run, plain, seen = Run(), untuned_run(epochs=1, dtype=dtype), []

    def evaluates(net):
        adapter(name).evaluate(run)
        seen.append(snapshot(net))

    fit(name, tmp_path, kind=Untuned, epochs=1, after=evaluates, run=run)
    assert_same_runs(run, plain)
    for step, state in enumerate(seen[2:], start=3):  # before, iterate and average are close
        assert_at_average(state, plain, step)


def test_weights_that_are_loaded_while_the_model_is_frozen_are_kept():
    net = torch.nn.Linear(3, 1)
    opt = Untuned(net.parameters())
    average = Average([opt], net)
    net(torch.ones(8, 3)).square().mean().backward()
    opt.step()
    net.requires_grad_(False)
    average.swap_in()
    torch.nn.init.ones_(net.weight)
    net.requires_grad_(True)
    with pytest.warns(UserWarning, match="without the state of Untuned"):
        average.swap_out()
    assert (net.weight == 1).all()
    assert opt.grad_evaluations == 0


# -- a second fit --------------------------------------------------------------------------------


@KEEP_THEIR_OPTIMIZER
def test_replaced_weights_restart_the_estimator(name, dtype, tmp_path):
    run = fit(name, tmp_path)
    other = network(dtype, seed=1).state_dict()
    run.net.load_state_dict(other)
    adapter(name).again(run)

    def before(step, opt, net):
        if step == SAMPLES:
            net.load_state_dict(other)
            opt.restart()

    assert_same_runs(run, plain_run(epochs=2 * EPOCHS, before=before, dtype=dtype))
    assert run.opt.grad_evaluations == 2 * (2 * SAMPLES - 1)


@KINDS
@KEEP_THEIR_OPTIMIZER
def test_a_second_fit_without_a_change_continues(name, dtype, tmp_path, kind):
    run = fit(name, tmp_path, kind=kind)
    with torch.no_grad():
        run.net.eval()(torch.ones(2, 6, dtype=dtype))
    adapter(name).again(run)
    assert_same_states(run.states, plain_run(kind=kind, epochs=2 * EPOCHS, dtype=dtype).states)


@KEEP_THEIR_OPTIMIZER
def test_untuned_starts_over_from_weights_that_are_loaded_alone(name, dtype, tmp_path):
    run, begun = fit(name, tmp_path, kind=Untuned), []
    other = network(dtype, seed=1).state_dict()
    run.net.load_state_dict(other)
    run.opt.register_step_pre_hook(lambda *_: begun.append(snapshot(run.net)))
    with pytest.warns(UserWarning, match="without the state of Untuned") as warned:
        adapter(name).again(run)
    assert len(warnings_with(warned, "without the state of Untuned")) == 1
    assert torch.equal(begun[0]["body.0.weight"], other["body.0.weight"])
    assert run.opt.diagnostics()["step"] == SAMPLES


# -- wrong set-ups, and runs that fail -----------------------------------------------------------


@trainers("huggingface", "fastai", "keras")
def test_without_the_integration_the_optimizer_refuses(name, tmp_path):
    with pytest.raises((TypeError, RuntimeError), match=r"needs a closure|StormPlusModelMixin"):
        fit(name, tmp_path, tool=False)


@trainers()
def test_a_failed_second_evaluation_leaves_nothing_behind(name, tmp_path):
    run = Run()
    with pytest.raises(OSError, match="a broken disc"):
        fit(name, tmp_path, fails_at=7, run=run)  # evaluations 1, 2-3, 4-5, 6-7
    assert len(run.states) == run.net.body[1].num_batches_tracked == 3
    if name != "keras":  # its `fit` has not returned the optimizer
        assert run.opt.pending
    if name not in ("fastai", "keras"):  # fastai calls no event then: the next batch cleans up
        assert not hooks_left(run.opt)


@KEEP_THEIR_OPTIMIZER
def test_writing_to_the_weights_at_every_batch_is_refused(name, tmp_path):
    @torch.no_grad()
    def clip(net):
        net.body[0].weight.clamp_(-0.5, 0.5)

    with pytest.raises(RuntimeError, match="writes to the parameters at every batch"):
        fit(name, tmp_path, after=clip)


@trainers("lightning", "huggingface", "fastai")
def test_each_callback_refuses_the_other_optimizers(name, tmp_path):
    ours = importlib.import_module(f"stormplus.integrations.{name}")
    with pytest.raises(TypeError, match="is for Untuned, got StormPlus"):
        fit(name, tmp_path, ours.UntunedCallback())
    if name != "huggingface":
        with pytest.raises(TypeError, match=r"got Untuned: .*UntunedCallback"):
            fit(name, tmp_path, ours.StormPlusCallback(), kind=Untuned)


@trainers("lightning", "huggingface", "accelerate", "fastai", "keras")
def test_a_missing_package_names_the_extra(name, monkeypatch):
    module = importlib.import_module(f"stormplus.integrations.{name}")
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install .*\[{name}\]"):
        importlib.reload(module)


# -- examples ------------------------------------------------------------------------------------

EXAMPLES = {  # what a program must print: each sample twice, but the first; statistics once
    "lightning_classifier.py --accumulate 2": "88 micro-batches in 44 steps, 174 evaluations, "
    "running statistics moved 88 times",
    "huggingface_trainer.py --out out": "44 steps of 2 micro-batches, 174 evaluations, "
    "running statistics moved 88 times",
    "accelerate_loop.py": "44 samples, 174 evaluations of micro-batches, "
    "running statistics moved 88 times",
    "fastai_learner.py": "42 batches, 83 evaluations, running statistics moved 42 times",
    "keras_model.py": "44 batches, 87 evaluations",
    "skorch_classifier.py": "58 batches, 115 evaluations, running statistics moved 58 times",
    "untuned_lightning.py --out out": "88 steps, 88 gradients, left at the average",
    "untuned_trainer.py --out out": "88 steps, 88 gradients, left at the average\n"
    "the last checkpoint is the same model",
}


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_example_counts_its_evaluations(command, tmp_path, monkeypatch):
    name = command.split("_")[0]
    skip_unless_installed(PACKAGES.get(name, "lightning"))
    monkeypatch.chdir(tmp_path)
    script, *options = command.split()
    assert EXAMPLES[command] in run_example(script, "--epochs", 2, *options)
