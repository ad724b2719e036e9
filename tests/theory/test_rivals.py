"""The rivals of research/finite_sum.py: what they estimate, and what they are charged for."""

import math

import numpy as np
import pytest
from research.rivals import METHODS, minimize_finite_sum

from stormplus.theory.problems import RobustRegression, outlier_regression


@pytest.fixture
def problem():
    return outlier_regression(60, 4)[0]


@pytest.fixture
def charged(problem):
    """Return a function that returns the sizes of a run's batches, as the problem saw them."""

    def run(method, budget):
        calls, grad = [], type(problem).grad
        problem.grad = lambda x, xi: calls.append(len(xi)) or grad(problem, x, xi)
        found = minimize_finite_sum(problem, problem.start(), budget, method=method, rng=0)
        assert found.ngev == sum(calls) <= budget
        assert found.nit > 0
        assert budget - sum(calls) < 3 * problem.n_samples  # the budget is used
        return calls

    return run


def test_each_is_charged_what_its_paper_says(charged):
    # SVRG: n / (3 mu) = 60 / 0.75 = 80 inner steps between anchors.
    assert charged("svrg", 60 + 2 * 80 + 60) == [60, *[1, 1] * 80, 60]
    # SCSG: mega-batches that grow to a full pass.
    mega = [size for size in charged("scsg", 2000) if size > 1]
    assert mega == [min(max(math.ceil(j**1.5), 8), 60) for j in range(1, len(mega) + 1)]
    assert mega[-1] == 60
    # SPIDER: sqrt(60) = 8 moves per pass, the first by the full gradient, 7 by differences.
    assert charged("spider", 60 + 7 * 16 + 60) == [60, *[8, 8] * 7, 60]
    # Hybrid SARAH: one mega-batch, then three gradients per step.
    first, *later = charged("hybrid-sarah", 3000)
    assert first == math.ceil(1001 ** (1 / 3))
    assert set(later) == {1}
    assert len(later) % 3 == 0


@pytest.mark.parametrize(
    ("method", "theory"),
    # Times 1 / L: SVRG's mu, SCSG's gamma, SPIDER's 1 / (2 n_0); hybrid SARAH has a horizon of
    # 200 / 3 = 66 steps and mega-batches of 1, so beta = 1 - 67^(-1/2) = 0.878, alpha^2 = 3.36, and
    # 2 / (1 + sqrt(1 + 4 alpha^2)) = 0.422.
    [("svrg", 1 / 4), ("scsg", 1 / 3), ("spider", 1 / 2), ("hybrid-sarah", 0.422)],
)
def test_with_one_data_point_every_rival_is_gradient_descent(method, theory):
    """n = 1: no noise, so each estimator is the gradient; the step size is that of theory."""
    problem = RobustRegression([[1.0, -2.0]], [3.0])
    start, smoothness = np.array([0.5, 0.5]), problem.constants.smoothness
    accuracy = {"accuracy": 1e9} if method == "spider" else {}
    for given, expected in ((0.05, 0.05), (None, theory / smoothness)):
        path, x = [], start
        options = {"step_size": given, "rng": 0, "callback": lambda r: path.append(r.x)} | accuracy
        minimize_finite_sum(problem, start, 200, method=method, **options)
        for found in path[:20]:
            x = x - expected * problem.full_grad(x)
            np.testing.assert_allclose(found, x, rtol=1e-12 if given else 1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_differences_reduce_the_variance(method, problem):
    """|grad f| over the last tenth of 20,000 gradients; SGD at this step size stays at 0.034."""
    norms = []

    def see(result):
        if result.ngev > 18_000:
            norms.append(np.linalg.norm(problem.full_grad(result.x)))

    options = {"step_size": 0.03, "rng": 0, "callback": see}
    assert minimize_finite_sum(problem, problem.start(), 20_000, method=method, **options).success
    assert np.mean(norms) < 0.01


def test_spider_moves_no_further_than_accuracy_over_l(problem):
    path = [problem.start()]
    options = {"rng": 0, "accuracy": 1e-3, "callback": lambda r: path.append(r.x)}
    minimize_finite_sum(problem, path[0], 2000, method="spider", **options)
    moves = np.linalg.norm(np.diff(path, axis=0), axis=1)
    assert moves.max() <= 1e-3 / problem.constants.smoothness * (1 + 1e-9)


def test_divergence_is_a_status():
    steep = RobustRegression([[1.0]], [0.0])
    steep.grad = lambda x, xi: -1e300 * (1 + np.abs(x))
    result = minimize_finite_sum(steep, np.ones(1), 100, method="svrg", step_size=1e10, rng=0)
    assert not result.success
    assert np.isfinite(result.x).all()
