"""What only `untuned` has: its scales, its average, and one gradient per step."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_problems import (
    CURVATURES,
    PARAMS,
    Regression,
    assert_finite,
    assert_trees_close,
    assert_trees_equal,
    quadratic,
    run,
    walk,
)
from untuned_oracle import untuned_run

from stormplus.jax import averaged, storm_plus, untuned


def one_gradient(tx, grad=quadratic, params=PARAMS, samples=CURVATURES):
    """As a user of any optax optimizer writes it: no grad_fn, and all the points."""

    def body(carry, sample):
        params, state = carry
        updates, state = tx.update(grad(params, sample), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    first = (params, tx.init(params))
    (params, state), points = jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))(first, samples)
    return params, state, points


# --- no scale is special ---------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_the_scales_of_f_and_x_do_not_matter():
    """f'(x) = f_scale f(x / x_scale) from x_scale x_1 visits x_scale times the points of f."""
    problem, tx = Regression(), untuned(scope="tensor")
    samples = jnp.asarray(np.random.default_rng(3).integers(64, size=(100, 4)))

    @jax.jit
    def ends(f_scale, x_scale):
        def grad(params, rows):
            g = problem.grad([p / x_scale for p in params], rows)
            return [f_scale / x_scale * g_i for g_i in g]

        first = [x_scale * p for p in problem.params()]
        params, state = run(tx, grad, first, samples)
        return [[p / x_scale for p in tree] for tree in (params, averaged(state, params))]

    plain = ends(1.0, 1.0)
    for f_scale, x_scale in [(1e7, 1.0), (1.0, 1e-3), (3e-9, 2e4)]:
        assert_trees_close(ends(f_scale, x_scale), plain, rtol=1e-9)


def scaled(p, sample):
    return sample


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("x_size", [0.0, 1e-20, 1.0, 1e20])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e20])
def test_float32_is_the_oracle_at_every_size(size, x_size, n):
    """Neither |g|^2 nor |x|^2 of these is a float32."""
    g, x1 = (np.float32(v) * np.linspace(1, 2, n, dtype=np.float32) for v in (size, x_size))
    factors = np.array([1.0, -0.5, 2.0, 0.0, 1.0], np.float32)
    x, state = walk("untuned", jnp.asarray(np.outer(factors, g)), jnp.asarray(x1), grad=scaled)
    rows = untuned_run(lambda k, x, *_: [factors[k] * np.float64(g)], [x1], len(factors))
    got = {"x": x, "d": state.estimator, "s": state.unit, "r": state.distance}
    for key, value in got.items():
        np.testing.assert_allclose(value, rows[-1][key][0], rtol=1e-5)
    assert int(state.step) == len(factors)
    if size:
        assert (np.asarray(x) != x1).all()


def test_opposite_gradients_at_the_end_of_float32_do_not_overflow():
    samples = 3e38 * np.outer([1.0, -1.0, 1.0], np.ones(7))
    x, state = walk("untuned", jnp.asarray(samples, jnp.float32), jnp.ones(7), grad=scaled)
    assert_finite((x, state))
    assert int(state.step) == 3


def test_zero_parameters_start_with_a_hundredth():
    """A leaf of zeros alone; together with others it has their distance."""
    params = [jnp.zeros(4), jnp.full(4, 5.0)]
    tensor, whole = (untuned(scope=scope).init(params).distance for scope in ("tensor", "global"))
    np.testing.assert_allclose(tensor, [0.01, 0.05], rtol=1e-6)
    # |x| = 10 over eight elements, whose root mean square is 10 / sqrt(8)
    np.testing.assert_allclose(whole, 0.1 / np.sqrt(8), rtol=1e-6)


# --- the average -----------------------------------------------------------------------------


def test_the_average_never_influences_the_run():
    params, state = walk("untuned")
    without, none = walk("untuned", average=False)
    assert_trees_equal(without, params)
    assert none.average is None
    mean = averaged(state, params)
    assert float(jnp.abs(mean["a"] - params["a"]).max()) > 1e-4
    with pytest.raises(ValueError, match="average=False"):
        averaged(none, PARAMS)


def test_before_the_first_step_the_average_is_the_parameters():
    tx = optax.chain(optax.clip(1.0), untuned())
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    for params in (PARAMS, half, {}, {"a": None}, jnp.zeros((0, 3))):
        assert_trees_equal(jax.jit(averaged)(tx.init(params), params), params)


def test_the_average_keeps_what_bfloat16_cannot():
    x1 = jnp.full(2, 1.0, jnp.bfloat16)
    _, state, points = one_gradient(untuned(), lambda p, s: p, x1, jnp.ones(40))
    mean = np.zeros(2)
    for t, point in enumerate(np.asarray(points, np.float64), start=1):
        mean += 9 / (t + 8) * (point - mean)
    np.testing.assert_allclose(state.average, mean, rtol=1e-5)
    assert len(np.unique(np.asarray(points, np.float64))) > 3  # there was something to average


def test_the_average_takes_masked_leaves_from_the_parameters():
    params = {"a": PARAMS["a"], "frozen": jnp.arange(5)}
    tx = untuned(mask={"a": True, "frozen": False})
    moved, state, _ = one_gradient(
        tx, lambda p, s: {"a": p["a"], "frozen": 0.0 * p["frozen"]}, params
    )
    other = {"a": moved["a"], "frozen": jnp.arange(5) + 1}
    mean = averaged(state, other)
    assert_trees_equal(mean, {"a": state.average["a"], "frozen": other["frozen"]})


@pytest.mark.parametrize("state", [(), storm_plus().init(PARAMS), optax.adam(0.1).init(PARAMS)])
def test_without_a_state_of_it_there_is_no_average(state):
    with pytest.raises(ValueError, match="needs a state of untuned"):
        averaged(state, PARAMS)


# --- one transformation among others ---------------------------------------------------------


def test_it_needs_no_grad_fn():
    params, state, _ = one_gradient(untuned())
    assert_trees_close((params, state), walk("untuned"), rtol=1e-5, atol=1e-6)


def test_clipping_before_it_in_a_chain_is_clipping_inside():
    clip = optax.clip_by_global_norm(1.0)
    got, state, _ = one_gradient(optax.chain(clip, untuned()))
    expected, expected_state, _ = one_gradient(untuned(gradient_transform=clip))
    assert_trees_close(got, expected, rtol=1e-6)
    assert_trees_close(averaged(state, got), averaged(expected_state, expected), rtol=1e-6)
    assert float(jnp.abs(walk("untuned")[0]["a"] - expected["a"]).max()) > 1e-4


def test_multi_steps_hands_over_the_mean_gradient():
    tx = optax.MultiSteps(untuned(), every_k_schedule=2)
    got, state, _ = one_gradient(tx)
    expected, expected_state = walk("untuned", CURVATURES.reshape(-1, 2).mean(axis=1))
    assert_trees_close(got, expected, rtol=1e-6)
    assert_trees_close(averaged(state, got), averaged(expected_state, expected), rtol=1e-6)
    assert int(state.inner_opt_state.step) == 3


def test_partition_gives_each_label_a_distance_of_its_own():
    tx = optax.partition({0: untuned(), 1: untuned(0.5)}, {"a": 0, "b": 1})
    got, state, _ = one_gradient(tx)
    for name, lr in [("a", 1.0), ("b", 0.5)]:
        alone, alone_state = walk("untuned", params={name: PARAMS[name]}, lr=lr)
        np.testing.assert_allclose(got[name], alone[name], rtol=1e-6)
        mean = averaged(alone_state, alone)[name]
        np.testing.assert_allclose(averaged(state, got)[name], mean, rtol=1e-6)


def test_masked_leaves_nothing_to_do_where_the_holes_are():
    tx = optax.masked(untuned(), {"a": True, "b": False})
    moved, _, _ = one_gradient(tx, params={"a": PARAMS["a"], "b": 0 * PARAMS["b"]})
    alone, _ = walk("untuned", params={"a": PARAMS["a"]})
    np.testing.assert_allclose(moved["a"], alone["a"], rtol=1e-6)


def test_what_it_has_and_what_it_has_not():
    with pytest.raises(TypeError, match="average must be True or False, got None"):
        untuned(average=None)
    for name in ("norm", "correction", "distance", "gradient"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            untuned(**{name: None})
