"""STORM+ in measured units: extremes, and gradients that are not finite."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
from jax_problems import (
    assert_trees_equal,
    run,
    step_of,
)
from jax_units import (
    CURVATURES,
    MODES,
    compiled,
    eager,
    one_gradient,
    parts,
    walk,
)
from units_oracle import units_run

from stormplus.jax import untuned

pytestmark = pytest.mark.long  # most of it is compilation


# --- extremes --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("x_size", [0.0, 1e-20, 1.0, 1e20])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e20])
def test_float32_is_the_reference_at_every_size(size, x_size, n):
    """Neither |g|^2 nor |x|^2 of these is a float32."""
    g, x1 = (np.float32(v) * np.linspace(1, 2, n, dtype=np.float32) for v in (size, x_size))
    factors = np.array([1.0, -0.5, 2.0, 0.0, 1.0], np.float32)
    (x, state), _ = sweep(jnp.asarray(x1), jnp.asarray(g), jnp.asarray(factors))
    rows = units_run(lambda k, x, which: [factors[k] * np.float64(g)], [x1], len(factors))
    np.testing.assert_allclose(x, rows[-1]["x"][0], rtol=1e-5)
    np.testing.assert_allclose(state.estimator, rows[-1]["d"][0], rtol=1e-5)
    np.testing.assert_allclose(state.gradient_unit, rows[-1]["s"][0], rtol=1e-5)
    np.testing.assert_allclose(state.distance, rows[-1]["r"][0], rtol=1e-5)
    assert int(state.step) == len(factors)
    if size:
        assert (np.asarray(x) != x1).all()


@jax.jit
def sweep(x1, g, factors):
    return one_gradient(untuned(), lambda x, factor: factor * g, x1, factors)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.1e-19, 1.0, 1e8, 1e20])
def test_with_correction_float32_is_the_reference_or_does_nothing(size):
    """|g|^2 beneath float32 is a zero to the rules, and beyond it is not used: as in storm_plus."""
    g = np.float32(size) * np.ones(3, np.float32) / np.sqrt(np.float32(3))
    x, state = corrected_sweep(jnp.zeros(3), jnp.asarray(g))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((x, state)))
    if 1e-10 < size < 1e10:
        rows = units_run(lambda k, x, which: [np.float64(g)], [np.zeros(3)], 5, correction=True)
        np.testing.assert_allclose(x, rows[-1]["x"][0], rtol=1e-5)
        assert int(state.storm.step) == 5
    else:
        np.testing.assert_allclose(x, 0, atol=1e-18)


@jax.jit
def corrected_sweep(x1, g):
    return run(untuned(correction=True), lambda p, _: g, x1, jnp.zeros(5))


def test_opposite_gradients_at_the_end_of_float32_do_not_overflow():
    g = jnp.full(2, 3e38)
    (x, state), _ = sweep(jnp.ones(2), g, jnp.array([1.0, -1.0, 1.0]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((x, state)))
    assert int(state.step) == 3


@pytest.mark.parametrize(("correction", "scope"), [(False, "global"), (True, "tensor")])
def test_a_leaf_whose_gradient_is_always_zero_stays(correction, scope):
    params = {"dead": jnp.array([2.0, 0.0]), "live": jnp.array([1.0, 3.0])}
    tx = untuned(correction=correction, scope=scope)
    step = step_of(tx, lambda p, s: {"dead": 0 * p["dead"], "live": p["live"]})
    moved, state = params, tx.init(params)
    for _ in range(9):
        moved, state = step(moved, state, None)
    np.testing.assert_array_equal(moved["dead"], params["dead"])
    assert (moved["live"] != params["live"]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@MODES
def test_zero_parameters_start_with_a_hundredth(correction):
    """A leaf of zeros alone; together with others it has their unit."""
    params = [jnp.zeros(4), jnp.full(4, 5.0)]
    units = {
        scope: parts(correction, untuned(correction=correction, scope=scope).init(params))[
            1
        ]
        for scope in ("tensor", "global")
    }
    size = 10.0 if correction else 5.0  # |x| of four fives; its root mean square
    np.testing.assert_allclose(units["tensor"].distance, [0.01, 0.01 * size], rtol=1e-6)
    # |x| = 10 over eight elements, whose root mean square is 10 / sqrt(8)
    np.testing.assert_allclose(
        units["global"].distance, 0.1 if correction else 0.1 / np.sqrt(8), rtol=1e-6
    )


# --- gradients that are not finite -----------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("before", [0, 3])
def test_a_gradient_that_is_not_finite_has_no_effect(value, before):
    tx = untuned(scope="tensor", weight_decay=0.1, decoupled_weight_decay=True)
    params, state = eager(tx, CURVATURES[:before])
    bad = {"a": params["a"].at[1].set(value), "b": params["b"]}
    updates, after = tx.update(bad, state, params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
    assert_trees_equal(after, state._replace(skipped=state.skipped + 1))


def test_with_correction_a_second_gradient_that_is_not_finite_measures_nothing():
    params, state = walk(True, CURVATURES[:3])
    tx, _ = compiled(True)
    _, after = tx.update(
        params, state, params, grad_fn=lambda p: jax.tree.map(lambda x: x * jnp.nan, p)
    )
    assert_trees_equal(after.units, state.units)
    assert int(after.storm.restarts) == 1
    assert not bool(after.storm.started)
