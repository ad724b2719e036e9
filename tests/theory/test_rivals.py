"""SVRG, SCSG, SPIDER and hybrid SARAH: what they estimate, and what they are charged for."""

import math

import numpy as np
import pytest

from stormplus.theory.problems import RobustRegression, breast_cancer, outlier_regression
from stormplus.theory.rivals import METHODS, _Oracle, minimize_finite_sum


class Counting:
    """A finite sum that counts the gradients of single samples by itself."""

    def __init__(self, problem):
        self.problem, self.count, self.calls = problem, 0, []

    def __getattr__(self, name):
        return getattr(self.problem, name)

    def grad(self, x, xi):
        self.count += len(xi)
        self.calls.append(len(xi))
        return self.problem.grad(x, xi)


@pytest.fixture
def problem():
    return outlier_regression(60, 4)[0]


@pytest.mark.parametrize("method", METHODS)
def test_every_gradient_is_counted_and_the_budget_is_kept(problem, method):
    counting = Counting(problem)
    budget = 1000
    result = minimize_finite_sum(counting, problem.start(), budget, method=method, rng=0)
    assert result.ngev == counting.count <= budget
    assert budget - result.ngev < 3 * problem.n_samples
    assert result.nit > 0


def test_svrg_is_charged_a_full_pass_an_anchor_and_two_a_step(problem):
    counting = Counting(problem)
    minimize_finite_sum(counting, problem.start(), 60 + 2 * 80 + 60, method="svrg", rng=0)
    # n / (3 mu) = 60 / 0.75 = 80 inner steps between anchors.
    assert counting.calls == [60, *[1, 1] * 80, 60]


def test_scsg_is_charged_its_mega_batches(problem):
    counting = Counting(problem)
    minimize_finite_sum(counting, problem.start(), 2000, method="scsg", rng=0)
    mega = [size for size in counting.calls if size > 1]
    expected = [min(max(math.ceil(j**1.5), 8), 60) for j in range(1, len(mega) + 1)]
    assert mega == expected
    assert mega[-1] == 60  # they grow to a full pass


def test_spider_is_charged_full_passes_and_batches_of_sqrt_n(problem):
    counting = Counting(problem)
    minimize_finite_sum(counting, problem.start(), 60 + 7 * 16 + 60, method="spider", rng=0)
    # sqrt(60) = 8 moves a pass: the first by the full gradient, 7 by differences
    assert counting.calls == [60, *[8, 8] * 7, 60]


def test_hybrid_sarah_has_one_mega_batch_and_three_gradients_a_step(problem):
    counting = Counting(problem)
    minimize_finite_sum(counting, problem.start(), 3000, method="hybrid-sarah", rng=0)
    assert counting.calls[0] == math.ceil(1001 ** (1 / 3))
    assert set(counting.calls[1:]) == {1}
    assert len(counting.calls[1:]) % 3 == 0


@pytest.mark.parametrize("method", METHODS)
def test_with_one_sample_every_rival_is_gradient_descent(method):
    """n = 1: no noise, so each estimator is the gradient."""
    problem = RobustRegression([[1.0, -2.0]], [3.0])
    step, x, path = 0.05, np.array([0.5, 0.5]), []
    minimize_finite_sum(
        problem, x, 200, method=method, step=step, rng=0, callback=lambda r: path.append(r.x)
    )
    # SCSG's step is scaled by (b / B)^(2/3), and B = n = 1 here.
    for found in path[:20]:
        x = x - step * problem.full_grad(x)
        np.testing.assert_allclose(found, x, rtol=1e-12)


def test_svrg_estimator_is_unbiased(problem):
    rng = np.random.default_rng(0)
    x, anchor = rng.standard_normal((2, 4))
    oracle = _Oracle(problem, 10**6, rng)
    full = problem.full_grad(anchor)
    v = [oracle.pair(x, anchor, np.array([i])) + full for i in range(60)]
    np.testing.assert_allclose(np.mean(v, 0), problem.full_grad(x), atol=1e-14)
    # And reduced: near the anchor its variance is below that of a plain gradient.
    near = anchor + 0.01 * x
    v = np.array([oracle.pair(near, anchor, np.array([i])) + full for i in range(60)])
    plain = np.array([problem.grad(near, np.array([i])) for i in range(60)])
    assert v.var(0).sum() < 0.1 * plain.var(0).sum()


@pytest.mark.parametrize("method", METHODS)
def test_theory_step_and_tuned_step_both_make_progress(method):
    problem = breast_cancer()
    start = problem.start()
    first = np.linalg.norm(problem.full_grad(start))
    norms = {}
    for name, step in (("theory", None), ("tuned", 0.03)):
        result = minimize_finite_sum(problem, start, 12_000, method=method, step=step, rng=0)
        norms[name] = np.linalg.norm(problem.full_grad(result.x))
        assert result.success
    assert norms["theory"] < first
    assert norms["tuned"] < 0.5 * first


def test_spider_moves_no_further_than_accuracy_over_l(problem):
    points = [problem.start()]
    minimize_finite_sum(
        problem,
        points[0],
        2000,
        method="spider",
        rng=0,
        accuracy=1e-3,
        callback=lambda r: points.append(r.x),
    )
    moves = np.linalg.norm(np.diff(points, axis=0), axis=1)
    assert moves.max() <= 1e-3 / problem.constants.smoothness * (1 + 1e-9)


def test_divergence_is_a_status():
    problem = RobustRegression([[1.0]], [0.0])
    problem.grad = lambda x, xi: -1e300 * (1 + np.abs(x))
    result = minimize_finite_sum(problem, np.ones(1), 100, method="svrg", step=1e10, rng=0)
    assert not result.success
    assert result.message == "diverged"
    assert np.isfinite(result.x).all()


def test_errors_say_what_is_wrong(problem):
    with pytest.raises(ValueError, match="method must be one of svrg, scsg"):
        minimize_finite_sum(problem, problem.start(), 10, method="saga")
    problem.constants = type(problem.constants)()
    with pytest.raises(ValueError, match="pass smoothness="):
        minimize_finite_sum(problem, problem.start(), 10, method="svrg")
