"""What only pairs have: the order of a call, the second gradient, and what may stand around."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
    quadratic,
    run,
    step_of,
    walk,
)

# --- one call --------------------------------------------------------------------------------


def test_the_second_evaluation_is_where_the_update_leads():
    """Also in bfloat16, where the sum is rounded."""
    tx, params = storm_plus(0.5), jnp.array([3.0, 4.0], jnp.bfloat16)
    visited = []

    def grad_fn(p):
        visited.append(p)
        return 2.0 * p

    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(2.0 * params, state, params, grad_fn=grad_fn)
    assert (updates != 0).all()
    np.testing.assert_array_equal(visited[1], optax.apply_updates(params, updates))


def test_bfloat16_keeps_what_the_parameters_cannot():
    """d in bfloat16 would lose the small corrections that line 6 sums up."""
    x = jnp.full(4, 2.0, jnp.bfloat16)
    _, state = walk("storm_plus", [1.0, 1 / 512], x, grad=lambda p, s: s * jnp.ones(4, p.dtype))
    a = 1 / 5 ** (2 / 3)  # |g_1|^2 = 4
    expected = 1 / 512 + (1 - a) * (1 - 1 / 512)
    np.testing.assert_allclose(state.estimator, expected, rtol=1e-6)


def test_storm_constants_may_be_traced():
    def final(theta):
        return run(storm(theta=theta), quadratic, PARAMS, CURVATURES)[0]

    grid = jax.vmap(final)(jnp.array([0.1, 0.4]))
    expected, _ = walk("storm", theta=0.4)
    np.testing.assert_allclose(grid["a"][1], expected["a"], rtol=1e-6)


# --- the unit of the gradient -----------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRED)
def test_with_unit_first_the_scale_of_the_loss_does_not_matter(name):
    plain, state = walk(name, unit="first", lr=0.1)
    for scale in (1e-25, 1e-6, 1e6, 1e25):  # float32 has no square of the first and the last
        scaled, scaled_state = walk(name, scale * CURVATURES, unit="first", lr=0.1)
        assert_trees_close(scaled, plain, rtol=1e-5)
        np.testing.assert_allclose(scaled_state.unit, scale * state.unit, rtol=1e-5)
        for number in ("step", "restarts", "gain", "step_size", "sum_g_sq", "sum_d_sq_over_a"):
            assert_trees_close(getattr(scaled_state, number), getattr(state, number), rtol=1e-4)


def test_unit_first_is_the_first_norm_that_is_not_zero():
    params, state = walk("storm_plus", [0.0, np.nan], unit="first")
    assert float(state.unit) == 1
    params, state = walk("storm_plus", [2.0, 3.0], params, state, unit="first")
    np.testing.assert_allclose(state.unit, 2 * np.sqrt(26), rtol=1e-6)  # |(3, 4, 1)|^2 = 26
    restarted = state._replace(started=jnp.zeros_like(state.started))
    _, after = walk("storm_plus", [5.0], params, restarted, unit="first")
    assert float(after.unit) == float(state.unit)


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


# --- norms and sums --------------------------------------------------------------------------


MANY_LEAVES = [np.full(1 + k % 7, 0.1 * (k + 1), np.float32) for k in range(100)]
# Gradients, and whether jax has float64.
NORMS = [
    # A plain float32 sum stops growing at 2^24 equal terms.
    pytest.param(lambda: jnp.full(2**25, 0.1), False, marks=pytest.mark.long),
    pytest.param(lambda: MANY_LEAVES, False, marks=pytest.mark.long),
    # 300^2 is beyond float16, and 1e5 terms beyond what bfloat16 can count.
    (lambda: jnp.full(100_000, 300.0, jnp.float16), False),
    (lambda: jnp.full(100_000, 300.0, jnp.bfloat16), False),
    # 1e25 is a float32, its square is not.
    (lambda: jnp.full(10, 1e25, jnp.float32), True),
    (lambda: jnp.full(20_000, 1e25, jnp.float32), True),
]


@pytest.mark.parametrize(("make", "with_x64"), NORMS)
def test_the_sum_of_squares(make, with_x64, request):
    if with_x64:
        request.getfixturevalue("x64")
    g = make()
    exact = sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in jax.tree.leaves(g))
    tx = storm_plus()
    _, state = jax.jit(lambda s: tx.update(g, s, g, grad_fn=lambda p: g))(tx.init(g))
    assert int(state.step) == 1
    np.testing.assert_allclose(state.sum_g_sq.value, exact, rtol=1e-12 if with_x64 else 5e-7)


def test_the_compiled_float32_sum_is_compensated():
    """2^24 + 1 + 1 + ... in float32: XLA must not simplify the compensation away."""
    start = Sum(jnp.float32(2**24), jnp.float32(0))
    total = jax.jit(
        lambda s: jax.lax.scan(lambda c, _: (c.plus(jnp.float32(1)), None), s, length=1000)[0]
    )(start)
    assert float(total.value) + float(total.lost) == 2**24 + 1000  # a plain sum stays at 2^24


# --- what may not stand around them ----------------------------------------------------------


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
