"""The research scripts of the theory pages: their arithmetic, and that they run."""

from functools import partial

import numpy as np
import pytest
from tests.support.pages import run_python

from stormplus import minimize
from stormplus.rules import StormPlusRule
from stormplus.theory.bounds import main_theorem_constants
from stormplus.theory.problems import BoundedNonConvex


@pytest.fixture
def script(request, monkeypatch):
    """Return a function that imports a script of research/."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(request.config.rootpath / "research")
    return __import__


def test_many_runs_at_once_are_single_runs(script):
    """The vectorised Algorithm 1 is `minimize`, with lr and unit, on the same samples."""
    rates, options = script("rates"), {"lr": 0.5, "unit": 3.0}
    method = partial(rates.corrected_momentum, rule=StormPlusRule(), **options)
    many = BoundedNonConvex(10, np.array([0.0, 1.0])[:, None])
    found = np.array(rates.measure(method, many, (0, 1), [5, 40]))  # mean, RMS and last
    for i, seed in np.ndindex(2, 2):
        problem, path = BoundedNonConvex(10, float(i)), []
        signs = rates._signs((seed,), 10, 40)
        minimize(
            problem.grad,
            problem.start(np.random.default_rng([seed, 0])),
            lambda _: [part[0] for part in next(signs)],
            40,
            callback=lambda result: path.append(np.linalg.norm(problem.full_grad(result.x))),
            **options,
        )
        for k, part in enumerate((path[:5], path)):
            expected = np.mean(part), np.mean(np.square(part)) ** 0.5, part[-1]
            np.testing.assert_allclose(found[:, k, i, seed], expected, rtol=1e-9)


def test_slope_and_its_interval(script):
    T, slope = np.array([10, 100, 1000, 10_000]), script("rates").slope
    exact = np.outer(T ** (-1 / 3), [1.0, 2.0, 3.0])
    assert slope(T, exact, (100, 10_000)) == [-0.333, -0.333, -0.333]
    noisy = exact * [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1.5, 1.0, 0.6]]
    value, low, high = slope(T, noisy, (100, 10_000))
    assert low < value < high


@pytest.mark.long
def test_the_quick_plan_runs_and_shows_the_rates(script, request):
    path = request.config.rootpath / "research" / "rates.py"
    run = run_python(path, "--quick", "storm+", "sgd", "adagrad-norm")
    assert run.returncode == 0, run.stderr
    assert "| STORM+ | -0.3" in run.stdout
    assert "| STORM+ / AdaGrad-norm | 2.00 |" in run.stdout


@pytest.mark.long
def test_theorem_stormp_main_fails_without_a_constant_in_kappa(script):
    """T^(1/3) E|grad f(x_bar_T)| tends to 0.846 whatever L and B are (docs/theory.md)."""
    units = script("units")
    (scaled,) = units.scaled_means(np.array([300_000]), tuple(range(20)), [0.3, 0.1])
    printed = [main_theorem_constants(h, 1 + h, 2 * h, as_printed=True).kappa for h in (0.3, 0.1)]
    assert scaled == pytest.approx(units.PREDICTED, rel=0.08)
    assert printed[1] < 0.4 * printed[0]  # what the printed theorem says should happen
    assert scaled[1] > 0.9 * scaled[0]  # what happens
