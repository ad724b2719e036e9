"""What only `untuned` has: its scales, its average, its precision, and one gradient per step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stormplus import untuned_rule
from stormplus.jax import averaged, untuned
from stormplus.rules import Sum
from stormplus.untuned_rule import INTERPOLATION
from tests.jax.jax_problems import (
    CURVATURES,
    PARAMS,
    assert_finite,
    assert_trees_close,
    assert_trees_equal,
    quadratic,
    run,
    the_sample,
    walk,
)
from tests.support.untuned_oracle import untuned_run


def fast(params, state):
    return params + INTERPOLATION * state.z_minus_x


# --- scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("x_size", [0.0, 1e-20, 1.0, 1e20])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e20])
def test_float32_is_the_oracle_at_every_size(size, x_size, n):
    """Neither |g|^2 nor |x|^2 of these is a float32."""
    g, x1 = (np.float32(v) * np.linspace(1, 2, n, dtype=np.float32) for v in (size, x_size))
    factors = np.array([1.0, -0.5, 2.0, 0.0, 1.0], np.float32)
    samples = jnp.asarray(np.outer(factors, g))
    x, state = walk("untuned", samples, jnp.asarray(x1), grad=the_sample)
    expected = untuned_run(lambda k, x: [factors[k] * g.astype(np.float64)], [x1], len(factors))[-1]
    got = {"x": x, "s": state.grad_rms, "z": fast(x, state), "average": averaged(state, x)}
    for key, value in got.items():
        np.testing.assert_allclose(value, expected[key][0], rtol=1e-5)
    # The displacement D is a two-hundredth of x or more, so float32 knows it to 200 * 2^-24, and r
    # is at most D^5 over the square of the walk: five times that, 6e-5.
    np.testing.assert_allclose(state.distance, expected["r"], rtol=1e-4)
    np.testing.assert_allclose(state.step_size, expected["eta"], rtol=1e-4)
    effective_steps = state.effective_steps.total
    np.testing.assert_allclose(effective_steps, expected["effective_steps"], rtol=1e-5)
    assert int(state.step) == len(factors)
    if size:
        assert (np.asarray(x) != x1).all()


def test_opposite_gradients_at_the_end_of_float32_do_not_overflow():
    samples = 3e38 * np.outer([1.0, -1.0, 1.0], np.ones(7))
    x, state = walk("untuned", jnp.asarray(samples, jnp.float32), jnp.ones(7), grad=the_sample)
    assert_finite((x, state))
    assert int(state.step) == 3


def test_a_matrix_is_inputs_by_outputs():
    """R is one over the root of the inputs, or the leaf's root mean square if that is larger."""
    params = {
        "a vector": jnp.zeros(9),  # 1 / sqrt(9)
        "dense": jnp.zeros((4, 9)),  # 1 / sqrt(4)
        "filter": jnp.zeros((3, 3, 4, 2)),  # 1 / sqrt(3 * 3 * 4)
        "large": jnp.full((4, 9), -5.0),
        "nothing": jnp.zeros((4, 0)),
        "number": jnp.zeros(()),
    }
    state = untuned().init(params)
    np.testing.assert_allclose(state.ceiling, [1 / 3, 1 / 2, 1 / 6, 5, 1, 1], rtol=1e-6)
    initial = untuned_rule.initial_distance(state.ceiling)
    np.testing.assert_allclose(state.distance, initial, rtol=1e-6)


def test_the_distance_is_that_of_the_sample():
    """Every second coordinate of this leaf: those go one way, the others to and fro."""
    shape, steps = (101, 103), 12
    assert untuned_rule.sample_stride(101 * 103) == 2
    to_and_fro = np.where(np.arange(101 * 103) % 2, -1.0, 1.0).reshape(shape)
    grads = np.stack([np.ones(shape) * to_and_fro**k for k in range(steps)])
    x, state = walk("untuned", jnp.asarray(grads), jnp.zeros(shape), grad=the_sample)
    of_sample, of_all = (
        untuned_run(lambda k, x: [grads[k]], [np.zeros(shape)], steps, inputs_last=True, sample=n)
        for n in (4096, None)
    )
    np.testing.assert_allclose(state.distance, of_sample[-1]["r"], rtol=1e-5)
    np.testing.assert_allclose(x, of_sample[-1]["x"][0], rtol=1e-4, atol=1e-7)
    assert of_sample[-1]["r"][0] > 1.1 * of_all[-1]["r"][0]


def test_a_rare_gradient_moves_no_coordinate_by_more_than_the_distance():
    # After 39 steps of nothing g / s is sqrt((40 + 2) / 3) = 3.7, and the step size is r.
    grads = np.zeros((40, 3), np.float32)
    grads[-1] = [0, 5, -3]
    before, state = walk("untuned", jnp.asarray(grads[:-1]), jnp.ones(3), grad=the_sample)
    r, z = float(state.distance[0]), fast(before, state)
    x, state = walk("untuned", jnp.asarray(grads[-1:]), before, state, grad=the_sample)
    np.testing.assert_allclose((z - fast(x, state)), [0, r, -r], rtol=1e-4)
    expected = untuned_run(lambda k, x: [grads[k]], [np.ones(3)], 40)[-1]
    np.testing.assert_allclose(x, expected["x"][0], rtol=1e-5)


def test_the_count_of_steps_does_not_stand_still_in_float32():
    # 2^24 + 1 is not a float32. A constant gradient has u = 1: each step counts as one.
    state = untuned().init(jnp.ones(3))
    state = state._replace(effective_steps=Sum(jnp.full(1, 2.0**24), jnp.zeros(1)))
    _, state = walk("untuned", jnp.ones((4, 3)), jnp.ones(3), state, grad=the_sample)
    assert float(state.effective_steps.total[0]) == 2**24 + 4


# --- the average -----------------------------------------------------------------------------


def test_before_the_first_step_the_average_is_the_parameters():
    tx = optax.chain(optax.clip(1.0), untuned())
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    for params in (PARAMS, half, {}, {"a": None}, jnp.zeros((0, 3))):
        assert_trees_equal(jax.jit(averaged)(tx.init(params), params), params)


def test_the_average_takes_masked_leaves_from_the_parameters():
    params = {"a": PARAMS["a"], "frozen": jnp.arange(5)}
    tx = untuned(mask={"a": True, "frozen": False})
    moved, state = run(
        tx, lambda p, s: {"a": p["a"], "frozen": 0.0 * p["frozen"]}, params, CURVATURES
    )
    other = {"a": moved["a"], "frozen": jnp.arange(5) + 1}
    mean = averaged(state, other)
    assert_trees_equal(mean["frozen"], other["frozen"])
    apart = moved["a"] - mean["a"]
    np.testing.assert_allclose(apart, (1 - INTERPOLATION) * state.z_minus_x["a"], rtol=1e-4)
    assert (apart != 0).all()


# --- half precision --------------------------------------------------------------------------

# Numbers of both narrow dtypes; the last two are subnormal in float16.
NARROW = np.array([1.0, -2.0, 0.25, 0.0, 2.0**-16, -(2.0**-18)], np.float32)
DRAWS = np.random.default_rng(0).standard_normal((60, 6)).astype(np.float32) + 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "steps", "loss"),
    [(NARROW.round(2) + 8, 15, 1e-6), (NARROW, 60, 0.02)],
    ids=["away from zero", "around zero"],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_rounds_the_run_of_float32_and_nothing_is_lost(dtype, start, steps, loss):
    """`loss` is relative to the largest displacement.

    Where a weight crosses zero, the sum that optax makes may round once more, and the master is
    lost: some 2^-9 of a move. While r grows it magnifies that, by at most 5 per step: r is the
    distance times the square of a ratio that has the distance squared in it.
    """
    rows = DRAWS[:steps] - 0.5  # noise, so that steps stay small
    wide, wide_state = walk("untuned", rows, jnp.asarray(start), grad=the_sample)
    half, state = walk("untuned", rows, jnp.asarray(start, dtype), grad=the_sample)
    atol = loss * float(np.abs(wide - start).max())
    np.testing.assert_allclose(state.master, wide, rtol=1e-6, atol=atol)
    assert half.dtype == dtype
    assert_trees_equal(half, state.master.astype(dtype))
    mean = averaged(state, half)
    assert mean.dtype == dtype
    np.testing.assert_allclose(
        mean.astype(jnp.float32), averaged(wide_state, wide), rtol=5e-3, atol=1e-3 + atol
    )
    # The first steps are smaller than what the largest weight can hold, and arrive all the same.
    assert abs(float(wide[1] - start[1])) > 0.01


def test_parameters_that_were_set_are_where_it_goes_on():
    params, state = walk("untuned", DRAWS[:5], jnp.asarray(NARROW, jnp.bfloat16), grad=the_sample)
    again = params.at[1].set(7.0)
    assert float(averaged(state, again)[1]) == pytest.approx(7, abs=0.1)
    moved, after = walk("untuned", DRAWS[5:6], again, state, grad=the_sample)
    assert 6 < float(moved[1]) < 8
    one = walk("untuned", DRAWS[5:6], params, state, grad=the_sample)[1].master
    np.testing.assert_array_equal(jnp.delete(after.master, 1), jnp.delete(one, 1))


def test_sixteen_bits_for_the_state():
    """Half the memory; and, rounded at random, the run of float32 but for some noise."""
    x1 = jnp.ones(6)
    wide, _ = walk("untuned", DRAWS, x1, grad=the_sample)
    x, state = walk("untuned", DRAWS, x1, grad=the_sample, state_dtype=jnp.bfloat16)
    assert state.z_minus_x.dtype == state.grad_rms.dtype == jnp.bfloat16
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x - x1, wide - x1, atol=0.03 * float(jnp.abs(wide - x1).max()))
    assert (x != wide).any()
    again = walk("untuned", DRAWS, x1, grad=the_sample, state_dtype=jnp.bfloat16)
    assert_trees_equal(again, (x, state))


# --- one transformation among others ---------------------------------------------------------


def test_multi_steps_hands_over_the_mean_gradient():
    tx = optax.MultiSteps(untuned(), every_k_schedule=2)
    got, state = run(tx, quadratic, PARAMS, CURVATURES)
    expected, expected_state = walk("untuned", CURVATURES.reshape(-1, 2).mean(axis=1))
    assert_trees_close(got, expected, rtol=1e-6)
    assert_trees_close(averaged(state, got), averaged(expected_state, expected), rtol=1e-6)
    assert int(state.inner_opt_state.step) == 3


def test_partition_slows_some_leaves_down():
    tx = optax.partition({0: untuned(), 1: untuned(factor=0.5)}, {"a": 0, "b": 1})
    got, state = run(tx, quadratic, PARAMS, CURVATURES)
    for name, factor in [("a", 1.0), ("b", 0.5)]:
        alone, alone_state = walk("untuned", params={name: PARAMS[name]}, factor=factor)
        np.testing.assert_allclose(got[name], alone[name], rtol=1e-6)
        mean = averaged(alone_state, alone)[name]
        np.testing.assert_allclose(averaged(state, got)[name], mean, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_a_tree_of_factors_and_decays_is_the_oracles():
    """Numbers and schedules, like the parameters or a prefix of their tree.

    Gradients that agree allow larger steps, in all leaves together; vectors do not count.
    """
    rng, steps = np.random.default_rng(0), 40
    shapes = {"body": {"b": (3,), "w": (5, 3)}, "head": (3, 4)}
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    draw = lambda s: (len(s) > 1) + 0.3 * rng.standard_normal((steps, *s))  # noqa: E731
    start = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s)), shapes, is_leaf=is_shape)
    grads = jax.tree.map(draw, shapes, is_leaf=is_shape)
    factors = [0.1, 0.1, lambda moves: 1.0 / (1.0 + moves)]
    tx = untuned(
        factor={"body": factors[0], "head": factors[2]},
        weight_decay={"body": {"w": 0.3, "b": 0.0}, "head": 0.2},
    )
    x, state = run(tx, the_sample, start, grads)
    expected = untuned_run(
        lambda k, _: [g[k] for g in jax.tree.leaves(grads)], jax.tree.leaves(start), steps,
        inputs_last=True, lr=factors, weight_decay=[0.0, 0.3, 0.2],
    )[-1]  # fmt: skip
    assert_trees_close(x, expected["x"], rtol=1e-9)
    np.testing.assert_allclose(state.step_size, expected["eta"], rtol=1e-9)
    np.testing.assert_allclose(state.evidence, expected["evidence"], rtol=1e-9)
    assert (state.evidence > 10).all()


# Options, and the gradient of a leaf at a step; the clip of a move is at |u| = 1 in the first
# step, and beyond its bound where gradients are rare.
DERIVATIVES = {
    "at the bound of the clip": ({}, lambda step, x: x),
    "beyond the bound": ({}, lambda step, x: x * (step == 3)),
    "a gradient that is zero at first": ({}, lambda step, x: x - 2.0),
    "zero gradients": ({"weight_decay": 0.1}, lambda step, x: 0.0 * x),
    "zero gradients without decay": ({}, lambda step, x: jnp.zeros_like(x)),
    "a factor that begins at 0": (
        {"factor": lambda moves: jnp.where(moves < 1, 0.0, 1.0)},
        lambda step, x: x,
    ),
    "16 bits": ({"state_dtype": jnp.bfloat16, "weight_decay": 0.1}, lambda step, x: x),
}


@pytest.mark.long
@pytest.mark.parametrize(("options", "grad"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_of_a_run_by_its_start_are_finite(options, grad):
    """Beside a leaf in half precision that has no gradient."""

    @jax.jit
    @jax.value_and_grad
    def end(x1):
        tx = untuned(**options)
        x = {"moves": x1 * jnp.ones((2, 3)), "stays": jnp.zeros(2, jnp.bfloat16)}
        state = tx.init(x)
        for step in range(4):
            g = {"moves": grad(step, x["moves"]), "stays": 0 * x["stays"]}
            updates, state = tx.update(g, state, x)
            x = optax.apply_updates(x, updates)
        return jnp.sum(x["moves"]) + jnp.sum(x["stays"]).astype(jnp.float32)

    value, slope = end(2.0)
    assert np.isfinite(value)
    assert np.isfinite(slope)
    assert float(slope) != 0


def test_parameters_that_are_not_finite_stop_the_others_too():
    params = {"good": jnp.ones(3), "bad": jnp.array([1.0, jnp.inf])}
    tx = untuned()
    state = tx.init(params)
    move, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(move))
    assert (int(state.step), int(state.skipped)) == (0, 1)
