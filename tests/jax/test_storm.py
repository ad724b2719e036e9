"""What only pairs have: the order of a call, the second gradient, and what may stand around."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax

from stormplus.jax import storm, storm_plus, verify
from stormplus.rules import Sum
from tests.jax.jax_problems import (
    CURVATURES,
    PAIRED,
    PARAMS,
    Regression,
    assert_finite,
    assert_trees_close,
    assert_trees_equal,
    over,
    quadratic,
    run,
    step_of,
    walk,
)

# --- one call --------------------------------------------------------------------------------


def test_the_first_call_returns_zero_and_keeps_the_gradient():
    params, state = walk("storm_plus", [2.0])
    assert_trees_equal(params, PARAMS)
    assert_trees_close(state.estimator, quadratic(PARAMS, 2.0), rtol=1e-6)
    # |g|^2 = 36 + 64 + 4, a = 105^(-2/3), eta = (104 / a)^(-1/3)
    a = 105 ** (-2 / 3)
    np.testing.assert_allclose(state.gain, a, rtol=1e-6)
    np.testing.assert_allclose(state.step_size, (104 / a) ** (-1 / 3), rtol=1e-6)
    assert (int(state.step), int(state.moves), bool(state.started)) == (1, 0, True)


@over(PAIRED)
def test_the_second_evaluation_is_where_the_update_leads(name):
    """x_{t+1} = x_t - eta_t d_t, known before the sample; grad_fn is evaluated there."""
    tx, params = PAIRED[name](0.5), jnp.array([3.0, 4.0])
    visited = []

    def grad_fn(p):
        visited.append(p)
        return 2.0 * p

    state = tx.init(params)
    _, state = tx.update(2.0 * params, state, params, grad_fn=grad_fn)
    before = state
    updates, state = tx.update(2.0 * params, state, params, grad_fn=grad_fn)
    np.testing.assert_array_equal(visited[1], optax.apply_updates(params, updates))
    np.testing.assert_allclose(updates, -0.5 * before.step_size * before.estimator, rtol=1e-6)
    # Alg. 1, line 6
    expected = 2.0 * visited[1] + (1 - before.gain) * (before.estimator - 2.0 * params)
    np.testing.assert_allclose(state.estimator, expected, rtol=1e-6)


def test_bfloat16_keeps_what_the_parameters_cannot():
    """d in bfloat16 would lose the small corrections that line 6 sums up."""
    x = jnp.full(4, 2.0, jnp.bfloat16)
    _, state = walk("storm_plus", [1.0, 1 / 512], x, grad=lambda p, s: s * jnp.ones(4, p.dtype))
    a = 1 / 5 ** (2 / 3)  # |g_1|^2 = 4
    expected = 1 / 512 + (1 - a) * (1 - 1 / 512)
    np.testing.assert_allclose(state.estimator, expected, rtol=1e-6)


def test_storm_constants_are_checked_and_may_be_traced():
    with pytest.raises(ValueError, match="w must be a positive finite number, got 0"):
        storm(w=0)

    def final(theta):
        return run(storm(theta=theta), quadratic, PARAMS, CURVATURES)[0]

    with pytest.raises(ValueError, match="c must be a positive finite number, got -1"):
        jax.vmap(lambda theta: storm(theta=theta, c=-1))(jnp.ones(2))
    grid = jax.vmap(final)(jnp.array([0.1, 0.4]))
    expected, _ = walk("storm", theta=0.4)
    np.testing.assert_allclose(grid["a"][1], expected["a"], rtol=1e-6)


UPDATE_ERRORS = {
    "no grad_fn": ({}, TypeError, r"grad_fn = lambda p: .* got .* and None as grad_fn"),
    "a gradient as grad_fn": ({"grad_fn": 1.0}, TypeError, "a float as grad_fn"),
    "another structure": (
        {"grad_fn": lambda p: {"a": p["a"]}},
        TypeError,
        "what grad_fn returns must be a gradient with the structure of the parameters",
    ),
    "value_and_grad": (
        {"grad_fn": lambda p: (1.0, p)},
        TypeError,
        r"looks like \(value, gradient\): return the gradient alone",
    ),
    "another shape": (
        {"grad_fn": lambda p: {"a": p["a"], "b": p["b"][0]}},
        ValueError,
        r"\['b'\] is \(1,\), its gradient \(\)",
    ),
}


@pytest.mark.parametrize(("kwargs", "error", "message"), UPDATE_ERRORS.values(), ids=UPDATE_ERRORS)
def test_update_says_what_grad_fn_is(kwargs, error, message):
    with pytest.raises(error, match=message):
        storm_plus().update(PARAMS, storm_plus().init(PARAMS), PARAMS, **kwargs)


# --- the unit of the gradient -----------------------------------------------------------------


@over(PAIRED)
def test_with_unit_first_the_scale_of_the_loss_does_not_matter(name):
    plain, state = walk(name, unit="first", lr=0.1)
    for scale in (1e-6, 1e6):
        scaled, scaled_state = walk(name, scale * CURVATURES, unit="first", lr=0.1)
        assert_trees_close(scaled, plain, rtol=1e-5)
        np.testing.assert_allclose(scaled_state.unit, scale * state.unit, rtol=1e-5)
        for number in ("gain", "step_size", "sum_g_sq", "sum_d_sq_over_a"):
            assert_trees_close(getattr(scaled_state, number), getattr(state, number), rtol=1e-4)


def test_unit_first_is_the_first_norm_that_is_not_zero():
    params, state = walk("storm_plus", [0.0, np.nan], unit="first")
    assert float(state.unit) == 1
    params, state = walk("storm_plus", [2.0, 3.0], params, state, unit="first")
    np.testing.assert_allclose(state.unit, 2 * np.sqrt(26), rtol=1e-6)  # |(3, 4, 1)|^2 = 26
    restarted = state._replace(started=jnp.zeros_like(state.started))
    _, after = walk("storm_plus", [5.0], params, restarted, unit="first")
    assert float(after.unit) == float(state.unit)


def test_unit_first_works_where_float32_has_no_square():
    for size in (1e-25, 1e25):
        _, state = walk("storm_plus", size * CURVATURES, unit="first")
        assert (int(state.step), int(state.restarts)) == (len(CURVATURES), 0)
        np.testing.assert_allclose(state.unit, size * np.sqrt(26), rtol=1e-5)


# --- a second gradient that is not finite ----------------------------------------------------


class Flaky:
    """The gradient of a regression, spoilt at chosen calls of `grad_fn`."""

    problem = Regression()

    def __call__(self, params, sample):
        rows, bad_second, x_first = sample
        g = self.problem.grad(params, rows)
        bad = jnp.where(jnp.all(params[0] == x_first[0]), 0.0, bad_second)
        return [g[0].at[0, 0].add(bad), *g[1:]]


def test_a_second_gradient_that_is_not_finite_restarts_the_estimator():
    flaky, tx = Flaky(), storm_plus()
    rows = np.random.default_rng(0).integers(64, size=(5, 4))
    step, params = step_of(tx, flaky), flaky.problem.params(jnp.float32)
    state = tx.init(params)
    for i in range(3):
        params, state = step(params, state, (rows[i], 0.0, params))
    for value in (np.nan, np.inf, -np.inf):
        x3, before = params, state
        x4, pending = step(x3, before, (rows[3], value, x3))
        # The move stands: it depended on no gradient of that sample.
        moved = [x - before.step_size * d for x, d in zip(x3, before.estimator)]
        assert_trees_close(x4, moved, rtol=1e-6, atol=1e-7)
        # The sums do not.
        assert not bool(pending.started)
        assert int(pending.restarts) == 1
        assert int(pending.step) == int(before.step)
        assert int(pending.moves) == int(before.moves) + 1
        for name in ("sum_g_sq", "sum_d_sq_over_a", "gain", "step_size"):
            assert_trees_equal(getattr(pending, name), getattr(before, name))
        assert_finite(pending)
        # At the next call x stays, d <- g and the sums go on.
        x5, restarted = step(x4, pending, (rows[4], 0.0, x4))
        assert_trees_equal(x5, x4)
        g = flaky.problem.grad(x4, rows[4])
        assert_trees_close(restarted.estimator, g, rtol=1e-5, atol=1e-7)
        grown = restarted.sum_g_sq.total - before.sum_g_sq.total
        g_sq = sum(float(jnp.vdot(g_i, g_i)) for g_i in g)
        np.testing.assert_allclose(grown, g_sq, rtol=1e-4)
        assert bool(restarted.started)
        assert int(restarted.moves) == int(pending.moves)


def test_apply_if_finite_does_not_see_the_second_gradient_and_does_no_harm():
    ends = []
    for tx in (storm_plus(), optax.apply_if_finite(storm_plus(), 3)):
        flaky, rows = Flaky(), np.arange(20).reshape(5, 4)
        params = flaky.problem.params(jnp.float32)
        state, step = tx.init(params), step_of(tx, flaky)
        for row, bad in zip(rows, [0.0, 0.0, np.nan, 0.0, 0.0]):
            params, state = step(params, state, (row, bad, params))
        ends.append(params)
        assert_finite(params)
    assert_trees_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_restart_at_will():
    params, state = walk("storm_plus")
    state = state._replace(started=jnp.zeros_like(state.started))
    same, again = walk("storm_plus", [2.0], params, state)
    assert_trees_equal(same, params)
    assert_trees_close(again.estimator, quadratic(params, 2.0), rtol=1e-6)
    assert int(again.step) == len(CURVATURES) + 1


# --- norms and sums --------------------------------------------------------------------------


def first_sum(g):
    tx = storm_plus()
    _, state = jax.jit(lambda s: tx.update(g, s, g, grad_fn=lambda p: g))(tx.init(g))
    assert int(state.step) == 1
    return float(state.sum_g_sq.value)


def test_after_a_gradient_beyond_float32_the_run_goes_on():
    """One outlier of 1e15 among gradients of 1: a move and a restart, then as before."""
    scales = (1.0, 1.0, 1e15, 1.0, 1.0, 1.0)
    x, state = walk("storm_plus", scales, jnp.zeros(3), grad=lambda p, scale: scale * (p - 1))
    assert (int(state.restarts), int(state.step)) == (1, 5)
    assert float(jnp.linalg.norm(x - 1)) < np.sqrt(3)
    np.testing.assert_array_less(state.sum_g_sq.total, 15 + 1e-3)


@pytest.mark.long
def test_the_norm_of_many_float32_elements():
    """A plain float32 sum stops growing at 2^24 equal terms."""
    exact = 2**25 * float(np.float64(np.float32(0.1))) ** 2
    np.testing.assert_allclose(first_sum(jnp.full(2**25, 0.1)), exact, rtol=5e-7)


@pytest.mark.long
def test_the_norm_over_many_leaves():
    leaves = [np.full(1 + k % 7, 0.1 * (k + 1), np.float32) for k in range(100)]
    exact = sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in leaves)
    np.testing.assert_allclose(first_sum(leaves), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_are_squared_in_float32(dtype):
    """300^2 is beyond float16, and 1e5 terms beyond what bfloat16 can count."""
    g = jnp.full(100_000, 300.0, dtype)
    np.testing.assert_allclose(first_sum(g), 1e5 * float(g[0]) ** 2, rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n", [10, 20_000])
def test_with_x64_float32_gradients_are_squared_in_float64(n):
    """1e25 is a float32, its square is not."""
    g = jnp.full(n, 1e25, jnp.float32)
    np.testing.assert_allclose(first_sum(g), n * float(g[0]) ** 2, rtol=1e-12)


def test_the_compiled_float32_sum_is_compensated():
    """2^24 + 1 + 1 + ... in float32: XLA must not simplify the compensation away."""
    start = Sum(jnp.float32(2**24), jnp.float32(0))
    total = jax.jit(
        lambda s: jax.lax.scan(lambda c, _: (c.plus(jnp.float32(1)), None), s, length=1000)[0]
    )(start)
    assert float(total.value) + float(total.lost) == 2**24 + 1000  # a plain sum stays at 2^24


# --- what may not stand around them ----------------------------------------------------------


HOLES = {
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
    "partition": lambda tx: optax.partition({0: tx, 1: optax.sgd(0.1)}, {"a": 0, "b": 1}),
    "selective_transform": lambda tx: optax.transforms.selective_transform(
        tx, freeze_mask={"a": False, "b": True}
    ),
}


@pytest.mark.parametrize("wrap", HOLES.values(), ids=HOLES)
@over(PAIRED)
def test_trees_with_holes_raise(name, wrap):
    """The error is the line to write."""
    with pytest.raises(TypeError, match=r"holes.*write `\w+\(mask=\{.*\}\)`") as caught:
        wrap(PAIRED[name]()).init(PARAMS)
    line = str(caught.value).split("`")[1]
    assert line == f"{name}(mask={{'a': True, 'b': False}})"
    state = eval(line, dict(PAIRED)).init(PARAMS)
    assert len(jax.tree.leaves(state.estimator)) == 1


def test_a_wrapper_that_drops_the_extra_argument_raises():
    inner = storm_plus()
    tx = optax.GradientTransformation(inner.init, lambda g, s, p=None: inner.update(g, s, p))
    with pytest.raises(TypeError, match="None as grad_fn"):
        optax.chain(tx).update(PARAMS, (tx.init(PARAMS),), PARAMS, grad_fn=lambda p: p)


def test_clipping_before_it_in_a_chain_clips_one_gradient_of_the_two():
    clip = optax.clip_by_global_norm(1.0)
    _, state = run(optax.chain(clip, storm_plus()), quadratic, PARAMS, CURVATURES)
    # Were both clipped, the six gradients would add up to 6 times 1.
    assert float(state[1].sum_g_sq.total) > 100
    with pytest.raises(RuntimeError, match="gradient_transform= for clipping"):
        verify(state)
    _, right = run(storm_plus(gradient_transform=clip), quadratic, PARAMS, CURVATURES)
    assert float(right.sum_g_sq.total) < 6 + 1e-4
    verify(right)


def test_multi_steps_passes_the_last_micro_batch_only():
    """`accumulate` is what does it, in test_loops.py."""
    tx = optax.MultiSteps(storm_plus(), every_k_schedule=2)
    _, state = run(tx, quadratic, PARAMS, CURVATURES[:2])
    # |g_1|^2 of the mean curvature 2 would be 2^2 * 26; the last one's is 3^2 * 26.
    np.testing.assert_allclose(state.inner_opt_state.sum_g_sq.total, 9 * 26, rtol=1e-6)
    with pytest.raises(RuntimeError, match=r"differ at one point.*accumulate\(\)"):
        verify(state)
