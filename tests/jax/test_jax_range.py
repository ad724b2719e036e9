"""Norms, sums, and gradients from 0 to 1e20."""

import functools

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_problems import METHODS, run, step_of

from stormplus import minimize
from stormplus.jax import storm_plus
from stormplus.rules import Sum

SIZES = [0.0, 1e-20, 1e-12, 1e-4, 1.0, 1e5, 1e10, 1e15, 1e20]


STEPS = 5


@functools.cache
def compiled_sweep(method, dtype):
    """STEPS samples of a linear objective: the gradient is `g` everywhere."""
    tx = METHODS[method]()
    return jax.jit(lambda x, g: run(tx, lambda p, _: g, x, jnp.zeros(STEPS)))


def sweep(method, size, n, dtype):
    """The end of the sweep with |g| = `size`, and what it should be."""
    g = size * np.ones(n) / np.sqrt(n)
    x, state = compiled_sweep(method, dtype)(jnp.zeros(n, dtype), jnp.asarray(g, dtype))
    expected = minimize(lambda x, xi: g, np.zeros(n), None, STEPS, method=method)
    return x, state, expected.x


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_float64_is_the_reference_at_every_size(method, size, n):
    x, state, expected = sweep(method, size, n, jnp.float64)
    np.testing.assert_allclose(x, expected, rtol=1e-10)
    assert int(state.skipped) == int(state.restarts) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_float32_is_the_reference_or_does_nothing(method, size):
    """Never an inf, a NaN, or a step that only overflow explains.

    From about 3e11 the sum of |d|^2 / a (whose a only simplified STORM+ keeps large), from
    2e19 |g|^2 itself, is beyond float32. Such gradients are not used, and counted. Below
    1e-19, |g|^2 is beneath it: the rules see a zero, take eta = 1, and the steps are as
    small as the gradients.
    """
    n, largest = 3, 1e15 if method == "simplified-storm+" else 1e10
    x, state, expected = sweep(method, size, n, jnp.float32)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((x, state)))
    if size <= 1e-20:
        np.testing.assert_allclose(x, 0, atol=1e-19)
        assert int(state.step) == 5
    elif size <= largest:
        np.testing.assert_allclose(x, expected, rtol=1e-4)
        assert int(state.step) == 5
    else:
        np.testing.assert_array_equal(x, 0)
        assert int(state.step) == 0
        assert int(state.skipped) + int(state.restarts) == 5


def test_after_a_gradient_beyond_float32_the_run_goes_on():
    """One outlier of 1e15 among gradients of 1: a move and a restart, then as before."""
    tx, x = storm_plus(), jnp.zeros(3)
    step = step_of(tx, lambda p, scale: scale * (p - 1))
    state = tx.init(x)
    for scale in (1.0, 1.0, 1e15, 1.0, 1.0, 1.0):
        x, state = step(x, state, scale)
    assert int(state.restarts) == 1
    assert int(state.step) == 5
    assert float(jnp.linalg.norm(x - 1)) < np.sqrt(3)
    np.testing.assert_array_less(state.sum_g_sq.total, 15 + 1e-3)


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.floats(-30, 25), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_any_sequence_of_sizes_leaves_the_state_finite(exponents, seed):
    rng = np.random.default_rng(seed)
    g = jnp.asarray(np.float32(rng.standard_normal(4)))
    scales = np.zeros(6, np.float32)
    scales[: len(exponents)] = [10.0**e for e in exponents]
    x, state = _sweep_scales(g, jnp.asarray(scales))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((x, state)))
    assert int(state.step) + int(state.skipped) + int(state.restarts) == 6


@jax.jit
def _sweep_scales(g, scales):
    return run(storm_plus(), lambda x, scale: scale * g, jnp.zeros(4), scales)


def test_the_norm_of_many_float32_elements():
    """A plain float32 sum stops growing at 2^24 equal terms."""
    n = 2**25
    tx, x = storm_plus(), jnp.zeros(n)
    g = jnp.full(n, 0.1)
    exact = n * float(np.float64(np.float32(0.1))) ** 2

    @jax.jit
    def first(state):
        return tx.update(g, state, x, grad_fn=lambda p: g)[1]

    state = first(tx.init(x))
    np.testing.assert_allclose(float(state.sum_g_sq.value), exact, rtol=5e-7)


def test_the_norm_over_many_leaves():
    leaves = [np.full(1 + k % 7, 0.1 * (k + 1), np.float32) for k in range(300)]

    @jax.jit
    def first(leaves):
        return storm_plus().update(leaves, storm_plus().init(leaves), leaves, grad_fn=lambda p: p)

    _, state = first(leaves)
    exact = sum(float(np.sum(np.asarray(leaf, np.float64) ** 2)) for leaf in leaves)
    np.testing.assert_allclose(float(state.sum_g_sq.value), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_are_squared_in_float32(dtype):
    """300^2 is beyond float16, and 1e5 terms beyond what bfloat16 can count."""
    g = jnp.full(100_000, 300.0, dtype)
    _, state = storm_plus().update(g, storm_plus().init(g), g, grad_fn=lambda p: g)
    exact = 1e5 * float(g[0]) ** 2
    np.testing.assert_allclose(float(state.sum_g_sq.value), exact, rtol=1e-6)


def test_the_compiled_float32_sum_is_compensated():
    """2^24 + 1 + 1 + ... in float32: XLA must not simplify the compensation away."""
    start = Sum(jnp.float32(2**24), jnp.float32(0))
    total = jax.jit(
        lambda s: jax.lax.scan(lambda c, _: (c.plus(jnp.float32(1)), None), s, length=1000)[0]
    )(start)
    assert float(total.value) == 2**24  # what a plain sum would be left with
    assert float(total.total) == 2**24 + 1000


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n", [10, 20_000])
def test_with_x64_float32_gradients_are_squared_in_float64(n):
    """1e25 is a float32, its square is not."""
    g = jnp.full(n, 1e25, jnp.float32)
    _, state = storm_plus().update(g, storm_plus().init(g), g, grad_fn=lambda p: g)
    assert int(state.step) == 1
    np.testing.assert_allclose(float(state.sum_g_sq.value), n * float(g[0]) ** 2, rtol=1e-12)
