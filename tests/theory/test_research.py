"""The research scripts of the theory pages: their arithmetic, and that they run."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from stormplus import minimize
from stormplus.rules import StormPlusRule
from stormplus.theory.problems import BoundedNonConvex


@pytest.fixture
def rates(request, monkeypatch):
    folder = request.config.rootpath / "research"
    if not folder.exists():
        pytest.skip("needs research, which the source distribution leaves out")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(folder)
    import rates

    return rates


def test_many_runs_at_once_are_single_runs(rates):
    """The vectorised Algorithm 1 is `minimize`, with lr and unit, on the same samples."""
    options = {"lr": 0.5, "unit": 3.0}
    method = partial(rates.corrected_momentum, rule=StormPlusRule(), **options)
    many = BoundedNonConvex(10, np.array([0.0, 1.0])[:, None])
    mean, rms, last = rates.measure(method, many, (0, 1), [5, 40])
    for i, seed in np.ndindex(2, 2):
        problem = BoundedNonConvex(10, float(i))
        signs, path = rates._signs((seed,), 10, 40), []
        start = problem.start(np.random.default_rng([seed, 0]))

        def sample(_, signs=signs):
            return [part[0] for part in next(signs)]

        def keep(result, problem=problem, path=path):
            path.append(np.linalg.norm(problem.full_grad(result.x)))

        minimize(problem.grad, start, sample, 40, callback=keep, **options)
        found = [[mean[k, i, seed], rms[k, i, seed], last[k, i, seed]] for k in (0, 1)]
        expected = [[np.mean(p), np.mean(np.square(p)) ** 0.5, p[-1]] for p in (path[:5], path)]
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_slope_and_its_interval(rates):
    T = np.array([10, 100, 1000, 10_000])
    exact = np.outer(T ** (-1 / 3), [1.0, 2.0, 3.0])
    assert rates.slope(T, exact, (100, 10_000)) == [-0.333, -0.333, -0.333]
    noisy = exact * [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1.5, 1.0, 0.6]]
    value, low, high = rates.slope(T, noisy, (100, 10_000))
    assert low < value < high


@pytest.mark.long
def test_the_quick_plan_runs_and_shows_the_rates(rates, request):
    script = request.config.rootpath / "research" / "rates.py"
    command = [sys.executable, str(script), "--quick", "storm+", "sgd", "adagrad-norm"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "| STORM+ | -0.3" in run.stdout
    assert "| STORM+ / AdaGrad-norm | 2.00 |" in run.stdout
