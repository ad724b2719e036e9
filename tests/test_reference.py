"""`minimize`: against a literal Algorithm 1, by hand, and with bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Group, algorithm_1
from scipy.optimize import OptimizeResult

from stormplus import minimize


def wavy(x, xi):
    """Gradient of a bounded non-convex function; samples differ in curvature and slope."""
    return (1 + xi[0]) * np.sin(x) + 0.1 * np.tanh(x) + xi[1]


def draw(rng):
    return rng.uniform(-0.5, 0.5), rng.uniform(-0.3, 0.3)


def samples(seed, count):
    rng = np.random.default_rng(seed)
    return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize("method", ["storm+", "simplified-storm+", "storm"])
@pytest.mark.parametrize("norm", ["raw", "mean"])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_equals_the_literal_algorithm(method, norm, scope):
    x0 = [np.array([1.0, -2.0, 0.5]), np.array([[3.0], [0.1]])]

    def gradient(blocks, xi):
        return [wavy(b, xi) for b in blocks]

    def lr(t):
        return 1 / np.sqrt(t)

    expected = algorithm_1(
        gradient, [Group(x0, lr=lr)], samples(3, 200), method=method, norm=norm, scope=scope
    )
    result = minimize(gradient, x0, draw, 200, method=method, norm=norm, scope=scope, lr=lr, rng=3)
    for name, blocks in (("x", expected.x[-1]), ("estimator", expected.d[-1])):
        for ours, theirs in zip(result[name], blocks):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)
    gains = np.array([list(a.values()) for a in expected.gain]).squeeze()
    np.testing.assert_allclose(result.history["gain"], gains, rtol=1e-12)


def test_three_steps_by_hand():
    # f(x) = x^2/2 without noise: g = d = x, and eta_t = (sum x_i^2/a_{i+1})^(-1/3).
    # x_1 = sqrt(7):  a_2 = 8^(-2/3) = 1/4, eta_1 = (7*4)^(-1/3)
    # x_2 = sqrt(7) (1 - 28^(-1/3)) = 1.774449...
    result = minimize(lambda x, _: x, np.array([7**0.5]), None, 3)
    x1 = 7**0.5
    x2 = x1 - 28 ** (-1 / 3) * x1
    a3 = (1 + 7 + x2**2) ** (-2 / 3)
    x3 = x2 - (28 + x2**2 / a3) ** (-1 / 3) * x2
    assert result.x[0] == pytest.approx(x3, rel=1e-14)
    np.testing.assert_allclose(result.history["grad_norm"], [x1, x2, x3], rtol=1e-14)
    assert result.history["gain"][:2] == pytest.approx([0.25, a3], rel=1e-14)


def test_noiseless_estimator_is_the_gradient():
    # The paper's induction: with sigma = 0, d_t = grad f(x_t) at every step.
    seen = []
    minimize(
        lambda x, _: np.sin(x) + 0.1 * x,
        np.linspace(-3, 3, 7),
        lambda rng: None,
        100,
        callback=lambda r: seen.append((r.estimator, np.sin(r.x) + 0.1 * r.x)),
    )
    assert len(seen) == 100
    for d, gradient in seen:
        np.testing.assert_allclose(d, gradient, rtol=0, atol=1e-14)


def test_counts_evaluations_and_draws_one_sample_a_step():
    calls, draws = [], []

    def grad(x, xi):
        calls.append(xi)
        return x

    def sample(rng):
        draws.append(len(draws))
        return draws[-1]

    result = minimize(grad, np.ones(2), sample, 5)
    assert calls == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (result.nit, result.ngev, len(draws)) == (5, 9, 5)
    assert result.success
    assert isinstance(result, OptimizeResult)


def test_one_step_evaluates_once_and_does_not_move():
    result = minimize(lambda x, xi: x, [1.0, 2.0][:1], None, 1)
    assert result.ngev == 1
    assert result.x[0] == result.x_uniform[0] == 1.0


def test_random_point_leaves_the_samples_alone_and_is_uniform():
    # 2000 runs of 5 steps: which iterate was kept, chi-square with 4 degrees of freedom.
    counts = np.zeros(5)
    for seed in range(2000):
        path = []
        result = minimize(
            lambda x, xi: np.sin(x), 1.0, None, 5, rng=seed, callback=lambda r: path.append(r.x)
        )
        counts[[p == result.x_uniform for p in path].index(True)] += 1
    assert ((counts - 400) ** 2 / 400).sum() < 18.5  # 99.9%
    stream = []
    minimize(lambda x, xi: x * xi, 1.0, lambda rng: stream.append(rng.random()) or 1.0, 20, rng=7)
    np.testing.assert_array_equal(stream, np.random.default_rng(7).random(20))


def test_learning_rate_forms():
    x0 = [np.ones(2), np.ones(3)]

    def grad(x, xi):
        return [np.sin(b) for b in x]

    per_block = minimize(grad, x0, None, 5, lr=[1.0, 0.0])
    np.testing.assert_array_equal(per_block.x[1], np.ones(3))
    assert (per_block.x[0] != 1).all()
    function = minimize(grad, x0, None, 5, lr=lambda t: [1.0, 0.0])
    np.testing.assert_array_equal(function.x[0], per_block.x[0])


@pytest.mark.parametrize("at", [0.0, 1e-20, 1e20])
@pytest.mark.parametrize("method", ["storm+", "simplified-storm+", "storm"])
def test_extreme_gradients_stay_finite(method, at):
    result = minimize(lambda x, xi: np.full(1, at), np.zeros(1), None, 20, method=method)
    assert np.isfinite(result.x).all()
    assert 0 < result.gain <= 1


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from([-1e20, -1.0, -1e-20, 0.0, 1e-20, 1.0, 1e20]), min_size=1, max_size=8)
)
def test_any_gradients_keep_the_invariants(values):
    stream = iter(values + values)
    result = minimize(lambda x, xi: np.array(xi), 0.0, lambda rng: next(stream), len(values))
    history = result.history
    assert (np.diff(history["gain"]) <= 1e-15 * history["gain"][:-1]).all()
    assert ((history["gain"] > 0) & (history["gain"] <= 1)).all()
    assert np.isfinite(result.x).all()


def test_interrupts_lose_nothing():
    def stop_at(n, error):
        def callback(result):
            if result.nit == n:
                raise error

        return callback

    run = {"grad": lambda x, xi: np.sin(x), "x0": np.ones(3), "sample": None, "steps": 10}
    stopped = minimize(**run, callback=stop_at(4, StopIteration()))
    assert (stopped.nit, stopped.success) == (4, False)
    assert "stopped by the callback after 4 samples" in stopped.message
    for error in (KeyboardInterrupt(), ValueError("mine")):
        with pytest.raises(type(error)) as caught:
            minimize(**run, callback=stop_at(4, error))
        assert caught.value.result.nit == 4
        np.testing.assert_array_equal(caught.value.result.x, stopped.x)
        assert len(caught.value.result.history["gain"]) == 4


def test_non_finite_gradient_keeps_the_result_so_far():
    values = iter([1.0, 1.0, 1.0, np.inf, 1.0])
    with pytest.raises(FloatingPointError, match="gradient of block 0 is not finite") as caught:
        minimize(lambda x, xi: np.array([next(values)]), np.ones(1), None, 5)
    assert caught.value.result.nit == 2
    assert np.isfinite(caught.value.result.x).all()


GOOD = {"grad": lambda x, xi: x, "x0": np.ones(2), "sample": None, "steps": 3}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad": 1}, TypeError, "grad must be a function, got 1"),
        ({"grad": None}, TypeError, "grad must be a function, got None"),
        ({"sample": 3}, TypeError, "sample must be a function, got 3"),
        ({"callback": "x"}, TypeError, "callback must be a function, got 'x'"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"steps": 2.5}, TypeError, "steps must be an integer, got 2.5"),
        ({"steps": True}, TypeError, "steps must be an integer, got True"),
        ({"norm": "l1"}, ValueError, "norm must be one of raw, mean, got 'l1'"),
        ({"scope": "all"}, ValueError, "scope must be one of global, group, tensor, got 'all'"),
        ({"method": "sgd"}, ValueError, "method must be one of"),
        ({"theta": 1.0}, TypeError, "has no option theta"),
        ({"method": "storm", "w": -1}, ValueError, "w must be a positive finite number, got -1"),
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative, got -1.0"),
        ({"lr": -1.0, "steps": 1}, ValueError, "lr must be finite and not negative, got -1.0"),
        ({"lr": "fast"}, ValueError, "lr must be a number or one number a block, got 'fast'"),
        ({"lr": [1.0, 2.0, 3.0]}, ValueError, "one number a block"),
        ({"x0": []}, ValueError, "at least one block"),
        ({"x0": np.array([np.nan])}, ValueError, "x0 must be finite"),
        ({"grad": lambda x, xi: x[:1]}, ValueError, r"block 0 is \(2,\), its gradient \(1,\)"),
        ({"x0": [np.ones(2)], "grad": lambda x, xi: x[0]}, TypeError, "must return a list"),
        ({"x0": [np.ones(2)], "grad": lambda x, xi: []}, ValueError, "return 1 blocks"),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        minimize(**GOOD | change)


def test_only_the_callback_may_stop_the_run():
    samples = iter([1.0, 2.0])
    with pytest.raises(StopIteration) as caught:
        minimize(lambda x, xi: x, np.ones(1), lambda rng: next(samples), 10)
    assert caught.value.result.nit == 2


def test_failure_before_the_first_sample_has_a_result_too():
    with pytest.raises(FloatingPointError) as caught:
        minimize(lambda x, xi: x * np.nan, np.ones(2), None, 3)
    np.testing.assert_array_equal(caught.value.result.x, np.ones(2))
    assert caught.value.result.nit == 0


def test_sums_that_overflow_raise():
    with pytest.raises(FloatingPointError, match="too large for the sums"):
        minimize(lambda x, xi: np.full(1, 1e120), np.zeros(1), None, 3)


def test_empty_blocks_count_nothing():
    def grad(x, xi):
        return [np.ones(3), np.ones(0)]

    result = minimize(grad, [np.zeros(3), np.zeros(0)], None, 1, norm="mean")
    assert result.sum_g_sq == 1.0


def test_arguments_are_not_modified():
    x0 = np.ones(3)

    def rude(x, xi):
        g = np.sin(x)
        x[:] = 99  # a gradient function that scribbles on its input
        return g

    result = minimize(rude, x0, None, 3)
    np.testing.assert_array_equal(x0, np.ones(3))
    assert (np.abs(result.x) < 2).all()
