"""The study of STORM+ in measured units: its variants, its solver, and the tables of its page."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from stormplus import Untuned
from stormplus.bench import profiles, rows

pytestmark = pytest.mark.usefixtures("benchmark")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    """As the benchmark runs; small tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(stepper, evaluations=121):
    from benchmark_utils.network_workloads import digits
    from benchmark_utils.training import Training

    run = Training(digits("mlp"), stepper, 0)
    run.advance(evaluations)
    return run


def point(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def shipped(training):
    from benchmark_utils.steppers import AtAverage

    return AtAverage(Untuned(training.model.parameters()))


def study():
    spec = importlib.util.spec_from_file_location("study", ROOT / "benchmark" / "study_untuned.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measured_point_is_the_average_and_the_run_goes_on_from_the_iterate():
    run, other = train(shipped, 20), train(shipped, 20)
    last = point(run)
    model = run.stepper.result(run)
    average = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert not torch.equal(average, last)
    run.stepper.resume(run)
    run.advance(40)
    other.advance(40)
    assert torch.equal(point(run), point(other))
    assert run.evaluations == run.samples == 40


def test_every_variant_but_the_average_takes_other_steps():
    from benchmark_utils.units_variants import VARIANTS

    reference = point(train(shipped))
    for name, stepper in VARIANTS.items():
        run = train(stepper)
        assert run.status == "done"
        assert torch.isfinite(point(run)).all()
        assert torch.equal(point(run), reference) == (name == "no average"), name
        two = name.startswith("corrected")
        assert (run.evaluations, run.samples) == ((121, 61) if two else (121, 121)), name


def test_the_signal_of_pure_noise_stops_the_run_and_that_of_one_direction_does_not():
    from benchmark_utils.units_variants import MeasuredSignal

    moved = []
    for gradient in (torch.ones, torch.randn):
        torch.manual_seed(0)
        x = torch.nn.Parameter(torch.ones(1000))
        opt = MeasuredSignal([x])
        for _ in range(60):
            x.grad = gradient(1000)
            before = x.detach().clone()
            opt.step()
        moved.append(float((x.detach() - before).norm() / opt.diagnostics()["step_size"]))
    assert moved[0] > 25  # sqrt(1000): the whole step
    assert moved[1] < 0.3 * 0.23 * moved[0]  # 0.23 is what averaging alone makes of noise


@pytest.mark.parametrize("suite", ["untuned", "networks", "smooth"])
def test_the_suites_know_it(suite):
    from stormplus.bench.plan import read_suite

    names = [next(iter(s)) if isinstance(s, dict) else s for s in read_suite(suite)["solver"]]
    assert "storm-plus-units" in names


def test_the_held_out_workloads_are_the_ones_that_were_drawn():
    listed = [
        line.split("|")[1:4]
        for line in (ROOT / "docs" / "untuned.md").read_text().splitlines()
        if line.rstrip().endswith(("| open |", "| **held out** |"))
    ]
    names = [name.strip() for name, _, _ in listed]
    drawn = sorted(np.random.default_rng(0).choice(10, 2, replace=False))
    assert [names[i] for i in drawn] == study().HELD_OUT
    assert sorted(names) == sorted(study().TEN)


@pytest.mark.long
def test_the_page_says_what_the_rows_say(tmp_path, monkeypatch):
    """The committed tables are those that `make untuned` writes, and the verdict holds."""
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
    frame = rows.load_all(
        tuple(ROOT / "docs" / "results" / f"{name}.jsonl.gz" for name in module.PARTS[:3])
    )
    ten = frame[frame["workload"].isin(module.TEN)]
    profile = profiles.performance_profile(ten)
    assert np.isfinite(profile.times.loc[module.OURS]).sum() >= 7
    assert (ten[ten["method"] == module.OURS]["status"] == "done").all()
    assert profile.scores.idxmax() == module.OURS
