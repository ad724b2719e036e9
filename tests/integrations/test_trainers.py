"""Every trainer, every property that they share: a run is the plain loop's, to the bit."""

import importlib.util
import sys

import pytest
import torch
from pages import run_example, run_page
from trainer_cases import (
    BATCHES,
    EPOCHS,
    SAMPLES,
    STATISTICS,
    Run,
    assert_at_average,
    assert_same_runs,
    assert_same_states,
    hooks_left,
    network,
    plain_run,
    snapshot,
    untuned_run,
)

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus.integrations.untuned import Average

PACKAGES = {  # and the extra that installs it
    "lightning": ("lightning.pytorch", "lightning"),
    "huggingface": ("transformers", "huggingface"),
    "accelerate": ("accelerate", "accelerate"),
    "fastai": ("fastai.callback.core", "fastai"),
    "keras": ("keras", "keras"),
    "skorch": ("skorch", None),  # the mixin imports nothing of it
}
CLIPPING = "two gradients of a sample separately"
DTYPES = dict.fromkeys(("fastai", "keras"), torch.float32)  # they know no other


def trainers(*names):
    return pytest.mark.parametrize("name", names or tuple(PACKAGES))


@pytest.fixture
def cases(name):
    """The module with a trainer's `fit`."""
    package = PACKAGES[name][0].split(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    yield importlib.import_module(f"{name}_cases")
    if "accelerate.state" in sys.modules:
        states = sys.modules["accelerate.state"]
        states.AcceleratorState._reset_state(True)
        states.GradientState._reset_state()


def dtype_of(name):
    return {"dtype": DTYPES[name]} if name in DTYPES else {}


# -- the plain loop's run ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [StormPlus, SimplifiedStormPlus, Storm], ids=lambda k: k.__name__)
@trainers()
def test_the_run_is_the_plain_loops(name, cases, tmp_path, kind):
    run = cases.fit(tmp_path, kind=kind, lr=0.5)
    plain = plain_run(kind=kind, lr=0.5, **dtype_of(name))
    assert_same_runs(run, plain)
    assert type(run.opt) is kind
    assert run.net.evaluations == run.opt.grad_evaluations == 2 * SAMPLES - 1
    assert run.states[-1][STATISTICS] == SAMPLES
    assert not hooks_left(run.opt)


def falls(step):
    return 1.0 if step < 5 else 0.25


@trainers()
def test_a_schedule_of_the_lr(name, cases, tmp_path):
    run = cases.fit(tmp_path, lr=0.5, schedule=falls)
    assert_same_runs(run, plain_run(lr=0.5, schedule=falls, **dtype_of(name)))


@trainers("lightning", "huggingface", "accelerate", "fastai", "skorch")
def test_bf16(name, cases, tmp_path):
    run = cases.fit(tmp_path, half=torch.bfloat16, dtype=torch.float32)
    plain = plain_run(half=torch.bfloat16, dtype=torch.float32)
    assert_same_runs(run, plain)
    full = plain_run(dtype=torch.float32)
    assert not torch.equal(plain.states[-1]["body.0.weight"], full.states[-1]["body.0.weight"])


@trainers("lightning", "huggingface", "accelerate", "fastai", "skorch")
def test_clipping_sees_both_gradients(name, cases, tmp_path, recwarn):
    run = cases.fit(tmp_path, clip=0.05)
    told = [str(warning.message) for warning in recwarn if CLIPPING in str(warning.message)]
    assert len(told) == (name in ("lightning", "huggingface", "accelerate"))  # once
    assert_same_runs(run, plain_run(clip=0.05, **dtype_of(name)))
    assert run.opt.diagnostics()["grad_norm"] == pytest.approx(0.05, rel=1e-4)


@trainers("lightning", "huggingface", "accelerate", "skorch")
def test_accumulation_covers_all_micro_batches(name, cases, tmp_path):
    run = cases.fit(tmp_path, accumulate=4)  # 4 and 2 of them
    plain = plain_run(accumulate=4, divisor=4 if name == "lightning" else None)
    assert_same_runs(run, plain)
    assert run.net.evaluations == 2 * SAMPLES - 4
    assert run.opt.grad_evaluations == 2 * 4 - 1
    assert run.states[-1][STATISTICS] == SAMPLES


@pytest.mark.parametrize("scale", [2.0**10, 2.0**22], ids=["no overflow", "overflows"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.filterwarnings(f"ignore:.*{CLIPPING}")
@trainers("lightning", "huggingface", "accelerate")
def test_fp16_is_scaled_step(name, cases, tmp_path, scale, clip):
    options = {"half": torch.float16, "dtype": torch.float32, "scale": scale, "clip": clip}
    ours = options | ({} if name == "accelerate" else {"half": None})
    run, plain = cases.fit(tmp_path, **ours), plain_run(**options)
    assert_same_runs(run, plain)
    assert run.scaler.get_scale() == plain.scaler.get_scale()
    taken = int(plain.opt.diagnostics()["step"])
    assert run.states[-1][STATISTICS] == taken
    assert taken == SAMPLES if scale == 2.0**10 else 1 < taken < SAMPLES
    if name == "accelerate":  # a scheduler steps with the optimizer
        assert run.scheduler.last_epoch == taken


# -- checkpoints ---------------------------------------------------------------------------------

WAYS = {
    "lightning": ["ckpt_path"],
    "huggingface": ["resume_from_checkpoint"],
    "accelerate": ["load_state"],
    "fastai": ["save and load"],
    "keras": ["save", "save_weights", "BackupAndRestore"],
    "skorch": ["save_params", "Checkpoint", "pickle"],
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in WAYS for way in WAYS[name]])
def test_a_run_in_two_parts_is_the_whole_run(name, way, cases, tmp_path):
    assert list(cases.RESUMES) == WAYS[name]
    first, second = cases.RESUMES[way](tmp_path)
    if name == "keras":
        whole = cases.fitted(cases.keras_network(seeded=False))
    else:
        whole = plain_run(**dtype_of(name))
        assert first.net.evaluations + second.net.evaluations == 2 * SAMPLES - 1
    assert_same_states(first.states + second.states, whole.states)
    assert second.opt.diagnostics() == whole.opt.diagnostics()


# -- Untuned is an ordinary optimizer ------------------------------------------------------------

UNTUNED = [
    ("lightning", False),
    ("huggingface", False),
    ("accelerate", False),
    ("accelerate", True),
    ("keras", True),
    ("skorch", True),
]


@pytest.mark.parametrize(("name", "tool"), UNTUNED)
def test_untuned_takes_one_gradient_a_step(name, tool, cases, tmp_path):
    run = cases.fit(tmp_path, kind=Untuned, tool=tool)
    assert_same_runs(run, plain_run(kind=Untuned, **dtype_of(name)))
    assert run.net.evaluations == run.opt.grad_evaluations == SAMPLES
    assert run.states[-1][STATISTICS] == SAMPLES


@trainers("lightning", "huggingface", "accelerate")
def test_untuned_accumulates_as_the_trainer_does(name, cases, tmp_path):
    run = cases.fit(tmp_path, kind=Untuned, accumulate=2)
    assert_same_runs(run, plain_run(kind=Untuned, accumulate=2))
    assert (run.net.evaluations, run.opt.grad_evaluations) == (SAMPLES, SAMPLES // 2)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("lightning", r"got Untuned: .*callback of Untuned is UntunedCallback"),
        ("huggingface", r"got Untuned: .*transformers.Trainer.*UntunedCallback"),
        ("fastai", r"Untuned takes one gradient a step.*UntunedCallback"),
    ],
    ids=["lightning", "huggingface", "fastai"],
)
def test_untuned_has_no_use_for_a_second_evaluation(name, advice, cases, tmp_path):
    with pytest.raises(TypeError, match=advice):
        cases.fit(tmp_path, kind=Untuned, tool=True)


@trainers()
def test_what_is_validated_and_saved_is_the_average(name, cases, tmp_path):
    run, plain = cases.untuned(tmp_path), untuned_run(**dtype_of(name))
    assert_same_runs(run, plain)  # the iterates are those of a loop that never looks
    assert run.net.evaluations == run.opt.grad_evaluations == SAMPLES
    assert run.validated.keys() == {BATCHES, SAMPLES}
    assert {BATCHES, SAMPLES} & run.saved.keys()
    assert run.opt.at_average
    left = {SAMPLES: snapshot(run.net)}
    for found in (run.validated, run.saved, left):
        for step, state in found.items():
            assert_at_average(state, plain.averages[step - 1], plain.states[step - 1])


@trainers()
def test_a_run_that_was_saved_at_the_average_goes_on_from_the_iterate(name, cases, tmp_path):
    first, second = cases.untuned_in_two(tmp_path)
    assert (len(first.states), len(second.states)) == (BATCHES, BATCHES)
    plain = plain_run(kind=Untuned, **dtype_of(name))
    assert_same_states(first.states + second.states, plain.states)
    assert second.opt.diagnostics() == plain.opt.diagnostics()


# -- without the integration, and when something fails -------------------------------------------


@trainers("lightning", "skorch")
def test_without_the_integration_statistics_move_twice(name, cases, tmp_path):
    run = cases.fit(tmp_path, tool=False)
    assert run.net.body[1].num_batches_tracked == 2 * SAMPLES - 1


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("huggingface", TypeError, r"step\(\) needs a closure"),
        ("fastai", TypeError, r"step\(\) needs a closure"),
        ("keras", RuntimeError, r"class Model\(ClosureTraining, keras.Model\)"),
    ],
    ids=["huggingface", "fastai", "keras"],
)
def test_without_the_integration_the_optimizer_refuses(name, error, message, cases, tmp_path):
    with pytest.raises(error, match=message):
        cases.fit(tmp_path, tool=False)


@trainers()
def test_a_failed_second_evaluation_leaves_nothing_behind(name, cases, tmp_path):
    run, nets = Run(), []

    def setup(net):
        net.fails_at = 7  # evaluations 1, 2-3, 4-5, 6-7
        nets.append(net)

    with pytest.raises(OSError, match="a broken disc"):
        cases.fit(tmp_path, setup=setup, run=run)
    assert len(run.states) == nets[0].body[1].num_batches_tracked == 3
    if name != "keras":  # whose `fit` has not returned the optimizer
        assert run.opt.pending
    if name not in ("fastai", "keras"):  # fastai calls nobody then: the next batch cleans up
        assert not hooks_left(run.opt)


# -- weights that are replaced without the optimizer's state -------------------------------------


@trainers("huggingface", "fastai", "keras", "skorch")
def test_replaced_weights_start_the_estimator_anew(name, cases, tmp_path):
    run = cases.fit(tmp_path)
    other = network(seed=1, **dtype_of(name)).state_dict()
    run.net.load_state_dict(other)
    again(name, cases, run)

    def before(step, opt, net):
        if step == SAMPLES:
            net.load_state_dict(other)
            opt.restart()

    plain = plain_run(epochs=2 * EPOCHS, before=before, **dtype_of(name))
    assert_same_states(run.states, plain.states)
    assert run.opt.diagnostics() == plain.opt.diagnostics()
    assert run.opt.grad_evaluations == 2 * (2 * SAMPLES - 1)


@trainers("huggingface", "fastai", "keras", "skorch")
def test_nothing_starts_anew_without_a_change(name, cases, tmp_path):
    run = cases.fit(tmp_path)
    with torch.no_grad():
        run.net.eval()(torch.ones(2, 6, **dtype_of(name) or {"dtype": torch.float64}))
    again(name, cases, run)
    assert run.opt.grad_evaluations == 2 * 2 * SAMPLES - 1
    assert_same_states(run.states, plain_run(epochs=2 * EPOCHS, **dtype_of(name)).states)


def again(name, cases, run):
    """Train as long as before, with the same trainer."""
    if name == "huggingface":
        run.trainer.train()
    elif name == "fastai":
        run.learn.fit(EPOCHS)
    elif name == "keras":
        cases.fitted(run.trainer, lambda: cases.snapshot(run.net), first=SAMPLES, run=run)
    else:
        run.trainer.partial_fit(*cases.data())


# -- pages, examples, extras ---------------------------------------------------------------------

EXAMPLES = {  # what a program must print: each sample twice, but the first; statistics once
    "lightning": [
        ("lightning_classifier.py", "--epochs", 2, "--accumulate", 2),
        # 44 batches of 32 rows: 88 micro-batches, the first two of them evaluated once
        "88 micro-batches in 44 steps, 174 evaluations",
        "running statistics moved 88 times",
    ],
    "huggingface": [
        ("huggingface_trainer.py", "--epochs", 2, "--out", "out"),
        f"44 steps of 2 micro-batches, {2 * (2 * 44 - 1)} evaluations",
        "running statistics moved 88 times",
    ],
    "accelerate": [
        ("accelerate_loop.py", "--epochs", 2),
        f"44 samples, {2 * (2 * 44 - 1)} evaluations",  # 22 batches of 64 rows in 2 halves
        "running statistics moved 88 times",
    ],
    "fastai": [
        ("fastai_learner.py", "--epochs", 2),
        "42 batches, 83 evaluations, running statistics moved 42 times",
    ],
    "keras": [("keras_model.py", "--epochs", 2), "44 batches, 87 evaluations"],
    "skorch": [
        ("skorch_classifier.py", "--epochs", 2),
        "58 batches, 115 evaluations, running statistics moved 58 times",
    ],
}


@trainers()
def test_the_example_counts_its_evaluations(name, cases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *lines = EXAMPLES[name]
    out = run_example(*command)
    for line in lines:
        assert line in out


UNTUNED_EXAMPLES = {
    "lightning": ["untuned_lightning.py", "best checkpoint: accuracy 0."],
    "huggingface": ["untuned_trainer.py", "the last checkpoint is the same model"],
}


@trainers(*UNTUNED_EXAMPLES)
def test_the_example_of_untuned_ends_at_the_average(name, cases, tmp_path):
    script, line = UNTUNED_EXAMPLES[name]
    out = run_example(script, "--epochs", 3, "--out", tmp_path)
    assert "132 steps, 132 gradients, left at the average" in out
    assert line in out
    assert float(out.split("not trained on: ")[1]) > 0.85


@trainers("lightning", "huggingface")
def test_the_page_runs(name, cases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = run_page(f"integrations/{name}.md")
    if name == "lightning":
        assert page["trainer"].global_step == 4
    else:
        assert page["opt"].optimizer.grad_evaluations == 2 * 5 - 1


@trainers("lightning", "huggingface", "accelerate", "fastai", "keras")
def test_a_missing_package_names_the_extra(name, cases, monkeypatch):
    package, extra = PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"stormplus.integrations.{name}")
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'stormplus\[{extra}\]'"):
        importlib.import_module(f"stormplus.integrations.{name}")


@pytest.mark.parametrize("way", ["comes", "goes"])
def test_parameters_that_come_or_go_at_the_average_are_no_loaded_weights(way, recwarn):
    """As when Lightning's BaseFinetuning unfreezes a layer after the validation."""
    net, late = torch.nn.Linear(3, 1), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": net.parameters()}, {"params": [late]}]
    opt = Untuned(groups[:1] if way == "comes" else groups)
    average = Average([opt], net)
    for x in torch.randn(5, 8, 3):
        opt.zero_grad()
        (net(x).square().mean() + late.square().sum()).backward()
        opt.step()
    average.put_in()
    opt.add_param_group(groups[1]) if way == "comes" else opt.param_groups.pop()
    average.take_out()
    assert opt.grad_evaluations == 5
    assert not recwarn
    average.put_in()
    with torch.no_grad():
        net.weight.add_(1)  # and such are still seen
    with pytest.warns(UserWarning, match="without the state of Untuned"):
        average.take_out()


def test_weights_that_are_loaded_while_the_model_is_frozen_are_begun_from(recwarn):
    """Some freeze a model to evaluate it, and the best weights may be loaded then."""
    net = torch.nn.Linear(3, 1)
    opt = Untuned(net.parameters())
    average = Average([opt], net)
    for x in torch.randn(5, 8, 3):
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    net.requires_grad_(False)
    average.put_in()
    torch.nn.init.ones_(net.weight)
    net.requires_grad_(True)
    with pytest.warns(UserWarning, match="without the state of Untuned: it begins anew"):
        average.take_out()
    assert (net.weight == 1).all()
    assert opt.grad_evaluations == 0
