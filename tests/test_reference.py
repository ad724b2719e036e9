"""`minimize`: against a literal Algorithm 1, against torch, and with bad input."""

import numpy as np
import pytest

from stormplus import minimize
from stormplus.rules import StormPlusRule, StormRule
from tests.support.oracle import Group, algorithm_1
from tests.support.pages import run_python

METHODS = (
    "storm+", "simplified-storm+", "storm", "meta-storm-sg", "meta-storm-na", "normalized-storm",
)  # fmt: skip


def wavy(x, xi):
    """Gradient of a bounded non-convex function; samples differ in curvature and slope."""
    return (1 + xi[0]) * np.sin(x) + 0.1 * np.tanh(x) + xi[1]


def draw(rng):
    return rng.uniform(-0.5, 0.5), rng.uniform(-0.3, 0.3)


def by_block(x, xi):
    return [wavy(block, xi) for block in x]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("unit", [1.0, 7.0, "first"])
def test_equals_the_literal_algorithm_on_the_loss_divided_by_the_unit(method, unit):
    x0 = [np.array([1.0, -2.0, 0.5]), np.array([[3.0], [0.1]])]
    rng = np.random.default_rng(3)
    samples = [draw(rng) for _ in range(200)]

    def lr(t):
        return 1 / np.sqrt(t)

    g_0 = unit
    if unit == "first":
        g_0 = np.sqrt(sum(np.sum(g * g) for g in by_block(x0, samples[0])))

    def divided(x, xi):
        return [g / g_0 for g in by_block(x, xi)]

    expected = algorithm_1(divided, [Group(x0, lr=lr)], samples, method=method)
    result = minimize(by_block, x0, draw, 200, lr=lr, rng=3, method=method, unit=unit)
    for ours, theirs in zip(result.x + result.estimator, expected.x[-1] + expected.d[-1]):
        scale = 1 if any(ours is x for x in result.x) else g_0
        np.testing.assert_allclose(ours, scale * theirs, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(result.history["gain"], expected.gain, rtol=1e-12)
    np.testing.assert_allclose(result.history["step_size"], expected.step_size, rtol=1e-12)
    assert result.unit == pytest.approx(g_0)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_the_unit_is_the_first_gradient_that_is_not_zero(scale):
    def run(scale):
        factors, options = iter([0.0, 0.0, 3.0, -1.0, 2.0]), {"unit": "first", "rng": 0}
        return minimize(lambda x, xi: scale * xi * x, [2.0], lambda _: next(factors), 5, **options)

    base, scaled = run(1.0), run(scale)
    np.testing.assert_allclose(scaled.x, base.x, rtol=1e-9)
    assert scaled.unit == pytest.approx(6 * scale)
    norms = scaled.history["grad_norm"], scale * base.history["grad_norm"]
    np.testing.assert_allclose(*norms, rtol=1e-9)  # norms stay raw
    assert run(0.0).unit == 1


def test_a_rule_object_is_a_method_and_history_a_dict_of_arrays():
    seen = []

    def run(method, **options):
        return minimize(wavy, np.ones(2), draw, 200, method=method, rng=0, **options)

    result = run(StormPlusRule(), callback=lambda r: seen.append(r.history["gain"]))
    np.testing.assert_array_equal(result.x, run("storm+").x)
    np.testing.assert_array_equal(run(StormRule(theta=0.5)).x, run("storm", theta=0.5).x)
    assert {values.shape for values in result.history.values()} == {(200,)}
    for t, gains in enumerate(seen, start=1):  # also in the callback
        np.testing.assert_array_equal(gains, result.history["gain"][:t])


@pytest.mark.parametrize("x0", [[1.0, 2.0], (1, np.float32(2))], ids=str)
def test_a_list_of_numbers_is_a_vector(x0):
    expected = minimize(wavy, np.array([1.0, 2.0]), draw, 5, rng=0).x
    np.testing.assert_array_equal(minimize(wavy, x0, draw, 5, rng=0).x, expected)
    # A list with an array in it is a list of blocks.
    blocks = minimize(by_block, [np.array(1.0), 2.0], draw, 5, rng=0).x
    np.testing.assert_allclose(blocks, expected, rtol=1e-12)


def test_without_scipy_the_result_has_the_same_fields():
    code = (
        "import copy, sys\nsys.modules['scipy'] = sys.modules['scipy.optimize'] = None\n"
        "from stormplus import minimize\n"
        "r = copy.deepcopy(minimize(lambda x, _: x, [1.0, 2.0], None, 3))\n"
        "print(r.nit, r['ngev'], r.success, hasattr(r, 'fun'))"
    )
    run = run_python("-c", code)
    assert run.stdout.split() == ["3", "5", "True", "False"], run.stderr


def test_counts_evaluations_and_draws_one_sample_per_step():
    calls, draws = [], iter(range(99))
    result = minimize(lambda x, xi: calls.append(xi) or x, np.ones(2), lambda rng: next(draws), 5)
    assert calls == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (result.nit, result.ngev, next(draws), result.success) == (5, 9, 5, True)
    # One step evaluates once and does not move.
    result = minimize(lambda x, xi: x, [1.0], None, 1)
    assert (result.ngev, result.x[0], result.x_uniform[0]) == (1, 1.0, 1.0)


def test_uniform_iterate_leaves_the_samples_alone_and_is_uniform():
    # 1000 runs of 5 steps: which iterate was kept, chi-square with 4 degrees of freedom.
    counts = np.zeros(5)
    for seed in range(1000):
        path = []
        run = {"rng": seed, "callback": lambda r: path.append(float(r.x))}
        counts[path.index(minimize(lambda x, xi: np.sin(x), 1.0, None, 5, **run).x_uniform)] += 1
    assert ((counts - 200) ** 2 / 200).sum() < 18.5  # 99.9%
    stream = []
    minimize(lambda x, xi: x * xi, 1.0, lambda rng: stream.append(rng.random()) or 1.0, 20, rng=7)
    np.testing.assert_array_equal(stream, np.random.default_rng(7).random(20))


def test_a_learning_rate_per_block_or_a_function_of_t():
    def run(lr):
        return minimize(by_block, [np.ones(2), np.ones(3)], draw, 5, lr=lr, rng=0).x

    moved, kept = run([1.0, 0.0])
    np.testing.assert_array_equal(kept, np.ones(3))
    assert (moved != 1).all()
    np.testing.assert_array_equal(run(lambda t: [1.0, 0.0])[0], moved)


def test_interrupts_lose_nothing():
    def stopped_by(error, **changes):
        def callback(result):
            if result.nit == 4:
                raise error

        run = {"grad": lambda x, xi: np.sin(x), "x0": np.ones(3), "sample": None, "steps": 10}
        return minimize(**run | {"callback": callback} | changes)

    stopped = stopped_by(StopIteration())
    assert (stopped.nit, stopped.success) == (4, False)
    assert "stopped by the callback after 4 samples" in stopped.message
    for error in (KeyboardInterrupt(), ValueError("mine")):
        with pytest.raises(type(error)) as caught:
            stopped_by(error)
        assert caught.value.result.nit == len(caught.value.result.history["gain"]) == 4
        np.testing.assert_array_equal(caught.value.result.x, stopped.x)
    samples = iter([1.0, 2.0])  # only the callback may stop a run quietly
    with pytest.raises(StopIteration) as caught:
        stopped_by(None, sample=lambda rng: next(samples))
    assert caught.value.result.nit == 2


@pytest.mark.parametrize(("values", "kept"), [([1.0, 1.0, 1.0, np.inf], 2), ([np.nan], 0)])
def test_non_finite_gradient_keeps_the_result_so_far(values, kept):
    stream = iter(values)
    with pytest.raises(FloatingPointError, match="gradient of block 0 is not finite") as caught:
        minimize(lambda x, xi: np.array([next(stream)]), np.ones(1), None, 5)
    assert caught.value.result.nit == kept
    assert np.isfinite(caught.value.result.x).all()


def test_sums_that_overflow_raise():
    for large in (1e120, 1e160):
        with pytest.raises(FloatingPointError, match="too large for the sums: pass unit='first'"):
            minimize(lambda x, xi: np.full(1, large), np.zeros(1), None, 3)
    moved = minimize(lambda x, xi: np.full(1, 1e120), np.zeros(1), None, 3, unit="first")
    assert 0 < -moved.x[0] < 3
    with pytest.raises(FloatingPointError, match="too large for the sums"):  # only in this unit
        minimize(lambda x, xi: np.full(1, 1e150), np.zeros(1), None, 3, unit=1e-10)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad": 1}, TypeError, "not callable"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"steps": 2.5}, TypeError, "integer"),
        ({"unit": "second"}, ValueError, "positive finite number or 'first', got 'second'"),
        ({"unit": -1.0}, ValueError, "unit must be a positive finite number or 'first', got -1.0"),
        ({"unit": True}, ValueError, "unit must be a positive finite number"),
        ({"unit": 1e-170}, ValueError, "unit must be a positive finite number"),
        ({"unit": 1e160}, ValueError, "unit must be a positive finite number"),
        ({"method": StormRule}, TypeError, "a name or a rule object"),
        ({"method": StormRule(), "w": 2.0}, TypeError, "set w on the rule object"),
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative, got -1.0"),
        ({"lr": "fast"}, ValueError, "could not convert string to float: 'fast'"),
        ({"lr": [1.0, 2.0, 3.0]}, ValueError, "one number per block"),
        ({"x0": np.array([np.nan])}, ValueError, "x0 must be finite"),
        ({"x0": [1j]}, TypeError, "x0 must be real, got complex numbers"),
        ({"grad": lambda x, xi: x[:1]}, ValueError, r"x0 is \(2,\), its gradient \(1,\)"),
        ({"x0": [np.ones(2)], "grad": lambda x, xi: x[0]}, ValueError, "return 1 blocks"),
        ({"x0": [np.ones(2)], "grad": lambda x, xi: []}, ValueError, "return 1 blocks"),
    ],
)
def test_bad_input(change, error, message):
    good = {"grad": lambda x, xi: x, "x0": np.ones(2), "sample": None, "steps": 3}
    with pytest.raises(error, match=message):
        minimize(**good | change)


def test_empty_blocks_count_nothing_and_arguments_are_not_modified():
    def rude(x, xi):
        g = [np.ones(3), np.ones(0)]
        x[0][:] = 99  # a gradient function that scribbles on its input
        return g

    x0 = [np.zeros(3), np.zeros(0)]
    assert minimize(rude, x0, None, 1).sum_g_sq == pytest.approx(3)
    assert (np.abs(minimize(rude, x0, None, 3).x[0]) < 9).all()
    np.testing.assert_array_equal(x0[0], np.zeros(3))
