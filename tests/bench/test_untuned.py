"""The study of Untuned: its variants, its solver, and the tables of its page."""

import copy
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from benchopt.benchmark import Benchmark, _list_parametrized_classes

from stormplus import Untuned, rules
from stormplus.rules import StormPlusRule, Sums
from stormplus_bench import rows
from stormplus_bench.plan import FOLDER, read_suite
from stormplus_bench.train.catalogue import digits
from stormplus_bench.train.steppers import AtAverage
from stormplus_bench.train.training import Training
from stormplus_bench.train.variants import (
    VARIANTS,
    CorrectedUnitsRule,
    FourBuffers,
    PlainUntuned,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]


def train(stepper, evaluations=121):
    run = Training(digits("mlp"), stepper, 0)
    run.advance(evaluations)
    return run


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def shipped(training):
    return AtAverage(Untuned(training.model.parameters()))


def study():
    path = ROOT / "benchmark" / "scripts" / "untuned.py"
    spec = importlib.util.spec_from_file_location("study", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measured_is_the_average_and_the_run_goes_on_from_the_iterate():
    run, other = train(shipped, 20), train(shipped, 20)
    last = flat(run.model)
    assert not torch.equal(flat(run.stepper.result(run)), last)
    run.stepper.resume()
    run.advance(40)
    other.advance(40)
    assert torch.equal(flat(run.model), flat(other.model))
    assert run.evaluations == run.samples == 40


def test_the_plain_version_takes_the_steps_of_untuned():
    torch.manual_seed(0)
    layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    ours = torch.nn.Sequential(*layers).double()
    plain = copy.deepcopy(ours)
    optimizers = [(ours, Untuned(ours.parameters())), (plain, PlainUntuned(plain.parameters()))]
    for _ in range(50):
        x = torch.randn(32, 8, dtype=torch.float64)
        for model, opt in optimizers:
            opt.zero_grad()
            ((model(x) - x[:, :1].sin()) ** 2).mean().backward()
            opt.step()
        torch.testing.assert_close(flat(plain), flat(ours), rtol=1e-6, atol=1e-9)
    for _, opt in optimizers:
        opt.eval()
    torch.testing.assert_close(flat(plain), flat(ours), rtol=1e-6, atol=1e-9)


def test_every_variant_takes_other_steps():
    reference = flat(train(shipped).model)
    for name, stepper in VARIANTS.items():
        run = train(stepper)
        assert run.status == "done"
        assert torch.isfinite(flat(run.model)).all()
        assert not torch.equal(flat(run.model), reference), name
        two = name.startswith("corrected")
        assert (run.evaluations, run.samples) == ((121, 61) if two else (121, 121)), name
        assert run.stepper.state_mb > 0
        average = flat(run.stepper.result(run))
        run.stepper.resume()
        assert not torch.equal(average, flat(run.model)), name


def test_every_option_does_what_its_name_says():
    found = Benchmark(FOLDER, no_cache=True)
    solvers = found.check_solver_patterns(read_suite("untuned-options")["solver"])
    options = {s.option: s for s, _ in _list_parametrized_classes(*solvers)}
    runs = {name: train(lambda t, s=s: s.stepper(t, 1.0), 40) for name, s in options.items()}
    plain = flat(train(shipped, 40).model)
    assert {name for name, run in runs.items() if torch.equal(flat(run.model), plain)} == {
        "not recalibrated"  # which is about what is measured
    }
    state = runs["bfloat16 state"].stepper.optimizer.state
    assert {entry["unit"].dtype for entry in state.values()} == {torch.bfloat16}
    budget = digits("mlp").budget
    rates = {name: run.stepper.optimizer.param_groups[0]["lr"] for name, run in runs.items()}
    assert rates["linear to zero"] == pytest.approx(1 - 40 / budget)
    assert rates["cosine to zero"] == pytest.approx((1 + math.cos(math.pi * 40 / budget)) / 2)
    assert rates["warm-up of a tenth"] == pytest.approx(400 / budget + 1e-3)
    assert rates["clipped gradients"] == 1
    assert options["not recalibrated"].applies(digits("mlp"))[0]  # it has no BatchNorm


def test_four_buffers_takes_the_steps_that_its_table_says():
    """Literally, in float64: r, s^2, d, x and the average, of a hand-made gradient."""
    start = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
    x = torch.nn.Parameter(start.clone())
    opt = FourBuffers([x])
    y, d, s_sq, average, r = start.numpy().copy(), 0.0, 0.0, start.numpy().copy(), 0.0
    for t in range(1, 140):
        g = np.cos(t * np.array([1.0, 2.0, 3.0])) + y
        x.grad = torch.tensor(g)
        opt.step()
        d = d + max(0.1, 1 / t) * (g - d)
        s_sq = s_sq + max(0.01, 1 / t) * (g * g - s_sq)
        away = np.sqrt(np.mean((y - start.numpy()) ** 2))
        r = max(r, away, 0.01 * np.sqrt(np.mean(start.numpy() ** 2)))
        y = y - r / np.sqrt(t) * d / np.sqrt(s_sq)
        average = average + 9 / (t + 8) * (y - average)
        np.testing.assert_allclose(x.detach().numpy(), y, rtol=1e-9)
    opt.eval()
    np.testing.assert_allclose(x.detach().numpy(), average, rtol=1e-9)
    opt.train()
    np.testing.assert_allclose(x.detach().numpy(), y, rtol=1e-9)


def runaway(gradient=lambda t: torch.ones(10), steps=300, **options):
    """r at the end, the largest step and the last one, in scales of the tensor."""
    x = torch.nn.Parameter(torch.ones(10))
    opt = PlainUntuned([x], **options)
    sizes = []
    for t in range(steps):
        x.grad = gradient(t)
        before = opt.state[x]["fast"].clone() if t else x.detach().clone()
        opt.step()
        sizes.append(float((opt.state[x]["fast"] - before).abs().max()) / opt.scale[0])
    return opt.r[0] / opt.scale[0], max(sizes), sizes[-1]


def test_each_variant_lets_go_of_what_its_name_says():
    r, step, _ = runaway(fixed=True)
    assert r == 1
    bound = rules.untuned_step_size(1e9, 0, 1.0, 0.0)  # of a scale of 1
    assert step == pytest.approx(bound, rel=1e-4)
    assert runaway(ceiling=False)[0] > 2
    assert runaway(bounded=False)[1] > 2 * bound

    # Gradients that all point one way are evidence.
    assert runaway()[1] > 2 * bound

    # One r for all: a small tensor steps as far as a large one.
    xs = [torch.nn.Parameter(size * torch.ones(4)) for size in (1.0, 100.0)]
    opt = PlainUntuned(xs, one_distance=True)
    for x in xs:
        x.grad = torch.ones(4)
    opt.step()
    assert opt.r[0] == opt.r[1]
    moved = [float(opt.state[x]["origin"][0] - opt.state[x]["fast"][0]) for x in xs]
    assert moved[0] == pytest.approx(moved[1], rel=1e-4)

    # A hundred small gradients of changing sign, then a large one: g / s is about 10 in the
    # shorter window, and the clamp makes it 5.
    def late(t):
        return torch.full((10,), 1e6 if t == 299 else (-1.0) ** t)

    short = {"unit_weight": lambda t: max(0.01, 1 / t), "bounded": False}
    free, clamped = (runaway(late, **short, clamp=clamp)[2] for clamp in (math.inf, 5.0))
    assert free == pytest.approx(2 * clamped, rel=0.01)


def test_with_units_of_one_the_corrected_rule_is_the_papers():
    ours, paper = Sums(), Sums()
    for t in range(1, 20):
        g_sq, d_sq = 0.0 if t < 3 else 1.0 / t, 0.0 if t < 3 else 2.0 + t
        ours, *found = CorrectedUnitsRule()(ours, g_sq, d_sq, t, 1.0, 1.0)
        paper, *expected = StormPlusRule()(paper, g_sq, d_sq, t)
        assert found == pytest.approx(expected, rel=1e-14)


def test_the_held_out_workloads_are_the_ones_that_were_drawn():
    names = [
        line.split("|")[1].strip()
        for line in (ROOT / "docs" / "untuned.md").read_text().splitlines()
        if line.rstrip().endswith(("| open |", "| **held out** |"))
    ]
    drawn = sorted(np.random.default_rng(0).choice(10, 2, replace=False))
    assert [names[i] for i in drawn] == study().HELD_OUT
    assert sorted(names) == sorted(study().TEN)


@pytest.mark.long
def test_the_page_says_what_the_rows_say(tmp_path, monkeypatch):
    """The committed tables are those that `make untuned` writes, and no run has failed."""
    module = study()
    page = (ROOT / "docs" / "untuned.md").read_text()
    folder = tmp_path / "docs"
    (folder / "figures").mkdir(parents=True)
    (folder / "results").symlink_to(ROOT / "docs" / "results")
    (folder / "untuned.md").write_text(page)
    monkeypatch.setattr(module, "FOLDER", folder)
    module.main()
    assert (folder / "untuned.md").read_text() == page
    assert (folder / "figures" / "untuned.png").stat().st_size > 10_000
    frame = rows.load_all([ROOT / "docs" / "results" / "untuned.jsonl.gz"])
    assert frame["workload"].nunique() == 12
    assert (frame[frame["method"] == module.OURS]["status"] == "done").all()
