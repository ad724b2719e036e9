"""Problems: gradients in NumPy and torch, constants, and recovery of planted solutions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus import minimize
from stormplus.theory import problems


def planted_nmf(shape=(20, 60), rank=3, batch_size=16):
    """An NMF problem with unique factors: each part has its rows, and half of H is 0."""
    rng = np.random.default_rng(0)
    rows, columns = shape
    w = rng.uniform(0.5, 1.5, (rows, rank)) * (np.arange(rows)[:, None] % rank == np.arange(rank))
    h = rng.uniform(0.5, 1.5, (rank, columns)) * (rng.random((rank, columns)) < 0.5)
    return problems.NonNegativeFactorization(w @ h, rank, batch_size=batch_size), w, h


def planted_completion(shape=(40, 50), rank=3):
    rng = np.random.default_rng(0)
    full = rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    return problems.masked_matrix(full / np.sqrt(rank), rank)[0], full / np.sqrt(rank)


# Those with known constants first.
PROBLEMS = {
    "well": problems.BoundedNonConvex(4, 0.7),
    "ripple": problems.BoundedNonConvex(4, 0.7, profile="ripple", height=2.0),
    "noiseless": problems.BoundedNonConvex(4, 0.0),
    "logistic": problems.breast_cancer(batch_size=3),
    "outliers": problems.outlier_regression(50, 4)[0],
    "phase": problems.measured_image(problems.digit_image())[0],
    "digits nmf": problems.digits_nmf(rank=2, images=3),
    "nmf": planted_nmf((6, 9), 2, batch_size=5)[0],
    "completion": planted_completion((5, 7), 2)[0],
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def near(problem, seed, spread=0.3):
    rng = np.random.default_rng(seed)
    return problem.start(rng) + spread * rng.standard_normal(problem.dim)


@every_problem
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_and_value_by_autograd(problem, seed):
    x, xi = near(problem, seed), problem.sample(np.random.default_rng(seed))
    torch = pytest.importorskip("torch")
    module = problem.module(x)
    loss = module(xi)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(problem.value(x, xi), rel=1e-12)
    np.testing.assert_allclose(module.x.grad, problem.grad(x, xi), rtol=1e-10, atol=1e-13)
    np.testing.assert_array_equal(problem.module().x.detach(), problem.start())
    if isinstance(problem, problems.FiniteSum):  # indices may be tensors
        assert torch.equal(module(torch.as_tensor(xi)), loss)


@every_problem
def test_full_gradient_and_value_are_the_mean_over_samples(problem):
    x = near(problem, 2)
    if isinstance(problem, problems.FiniteSum):
        samples = np.arange(problem.n_samples)[:, None]
    else:  # all signs
        samples = np.array(np.meshgrid(*[[-1.0, 1.0]] * 8)).reshape(2, 4, -1).transpose(2, 0, 1)
    mean = np.mean([problem.grad(x, xi) for xi in samples], 0)
    np.testing.assert_allclose(problem.full_grad(x), mean, atol=1e-12)
    values = [problem.value(x, xi) for xi in samples]
    assert problem.full_value(x) == pytest.approx(np.mean(values), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(PROBLEMS)[:5]), st.integers(0, 100), st.sampled_from([0.01, 1.0, 30.0]))
def test_constants_bound_what_they_should(name, seed, spread):
    problem, rng = PROBLEMS[name], np.random.default_rng(seed)
    x, y = near(problem, seed, spread), near(problem, seed + 1000, spread)
    if seed % 2:
        y = x + 1e-4 * (y - x)  # close by, where curvature shows
    xi, known = problem.sample(rng), problem.constants
    assert np.linalg.norm(problem.grad(x, xi)) <= known.grad_bound * (1 + 1e-12)
    difference = np.linalg.norm(problem.grad(x, xi) - problem.grad(y, xi))
    assert difference <= known.smoothness * np.linalg.norm(x - y) * (1 + 1e-9)
    if known.value_range is not None:
        assert abs(problem.full_value(x) - problem.full_value(y)) <= known.value_range
    if isinstance(problem, problems.FiniteSum):
        full = problem.full_grad(x)
        singles = [problem.grad(x, np.array([i])) - full for i in range(problem.n_samples)]
        variance = np.mean([s @ s for s in singles]) / problem.batch_size
    else:
        dphi, dpsi = problem.slopes(x)
        variance = float((problem.scale**2 * (dphi**2 + dpsi**2)).sum())
    assert variance <= known.noise**2 * (1 + 1e-12)


@pytest.mark.parametrize("profile", ["well", "ripple"])
def test_bounded_constants_are_attained(profile):
    """Not only bounds: sigma and B are exact, and so are L and G of the ripple."""
    problem = problems.BoundedNonConvex(3, 0.6, profile=profile)
    centre, known = problem.data["centre"], problem.constants
    dphi, dpsi = problem.slopes(centre)
    assert (problem.scale**2 * (dphi**2 + dpsi**2)).sum() == pytest.approx(known.noise**2)
    far = centre + (np.pi if profile == "ripple" else 1e6)
    rise = problem.full_value(far) - problem.full_value(centre)
    assert rise == pytest.approx(known.value_range, rel=1e-6)
    u = np.linspace(-4, 4, 200_001)
    g = problem.grad(centre + u[:, None], np.ones((2, 3)))
    tight = 1e-4 if profile == "ripple" else 0.35
    assert np.abs(g).max() * np.sqrt(3) == pytest.approx(known.grad_bound, rel=tight)
    bend = np.abs(np.diff(g, axis=0)).max() / (u[1] - u[0])
    assert bend == pytest.approx(known.smoothness, rel=tight)


# Planted solutions are found again.


def solve(problem, steps, lr=3.0):
    return minimize(problem.grad, problem.start(), problem.sample, steps, lr=lr, rng=0).x


def relative(found, truth):
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


def test_phase_retrieval_recovers_the_digit_up_to_sign():
    problem, truth = problems.measured_image(problems.digit_image())
    x = solve(problem, 2000)
    assert problem.error(x, truth) < 1e-6
    assert problem.error(-x, truth) == pytest.approx(problem.error(x, truth))
    assert problem.error(problem.start(), truth) > 0.3


def test_nmf_recovers_the_planted_factors_up_to_order_and_scale():
    problem, w, h = planted_nmf()
    found_w, found_h = problem.factors(solve(problem, 6000))
    assert min(found_w.min(), found_h.min()) >= 0
    assert relative(found_w @ found_h, w @ h) < 0.01
    unit, found = (m / np.linalg.norm(m, axis=0) for m in (w, found_w))
    match = unit.T @ found
    assert match.max(axis=0) == pytest.approx(np.ones(3), abs=0.01)
    assert sorted(match.argmax(axis=0)) == [0, 1, 2]


def test_matrix_completion_recovers_entries_it_never_saw():
    problem, full = planted_completion()
    hidden = np.ones(full.shape, bool)
    hidden[tuple(problem.data["indices"].T)] = False
    assert relative(problem.matrix(solve(problem, 2000))[hidden], full[hidden]) < 1e-6


def test_robust_regression_recovers_coefficients_that_least_squares_misses():
    problem, truth = problems.outlier_regression()
    least_squares = np.linalg.lstsq(*problem.data.values(), rcond=None)[0]
    assert relative(solve(problem, 5000, 1.0), truth) < 0.02 < 0.3 < relative(least_squares, truth)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problems.BoundedNonConvex(3, -1.0), "sigma must be finite and not negative"),
        (lambda: problems.BoundedNonConvex(3, profile="hill"), "'well' or 'ripple', got 'hill'"),
        (lambda: problems.breast_cancer(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: problems.NonConvexLogistic(np.ones((2, 2)), [0, 1]), "targets must be -1 or 1"),
        (lambda: problems.RobustRegression(np.ones((2, 2)), [1.0]), "one number per row"),
        (lambda: problems.PhaseRetrieval(np.ones((2, 2)), [1.0, -1.0]), "must not be negative"),
        (lambda: problems.NonNegativeFactorization(-np.ones((2, 2)), 1), "no negative entry"),
        (lambda: problems.MatrixCompletion((2, 2), np.zeros((3, 2)), [1.0], 1), "one row"),
    ],
)
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
