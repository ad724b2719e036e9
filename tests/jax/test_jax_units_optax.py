"""STORM+ in measured units: one optax transformation among others."""

import pickle

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_problems import (
    Regression,
    assert_trees_close,
    assert_trees_equal,
    run,
    step_of,
)
from jax_units import (
    CURVATURES,
    MODES,
    PARAMS,
    compiled,
    eager,
    one_gradient,
    parts,
    quadratic,
    train,
    walk,
)

from stormplus.jax import UnitsState, averaged, untuned

pytestmark = pytest.mark.long  # most of it is compilation


# --- dtypes, masks, trees --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "dtype"), [(False, jnp.bfloat16), (False, jnp.float16), (True, jnp.bfloat16)]
)
def test_half_precision_has_float32_buffers(correction, dtype):
    params = {"half": jnp.full(3, 2.0, dtype), "single": jnp.ones(2)}
    tx = untuned(correction=correction)
    moved, state = train(
        correction,
        tx,
        lambda p, s: jax.tree.map(lambda x: x * s.astype(x.dtype), p),
        params,
        jnp.ones(8),
    )
    storm, units = parts(correction, state)
    assert moved["half"].dtype == units.origin["half"].dtype == dtype
    assert storm.estimator["half"].dtype == units.average["half"].dtype == jnp.float32
    assert averaged(state, moved)["half"].dtype == dtype
    if not correction:
        assert units.gradient_unit["half"].dtype == jnp.float32
    assert float(moved["half"][0]) < 2


def test_the_average_keeps_what_bfloat16_cannot():
    x1 = jnp.full(2, 1.0, jnp.bfloat16)
    (x, state), points = one_gradient(untuned(), lambda p, s: p, x1, jnp.ones(40))
    mean = np.zeros(2)
    for t, point in enumerate(np.asarray(points, np.float64), start=1):
        mean += 9 / (t + 8) * (point - mean)
    np.testing.assert_allclose(state.average, mean, rtol=1e-5)
    assert len(np.unique(np.asarray(points, np.float64))) > 3  # there was something to average


@MODES
def test_masked_leaves_stay_and_do_not_count(correction):
    """They have no buffer, and no part in n; the average takes them from the parameters."""
    params = {"a": jnp.array([3.0, 4.0]), "frozen": jnp.arange(5)}
    mask = {"a": True, "frozen": False}

    def grad(p, sample):
        return jax.tree.map(lambda leaf: sample * leaf.astype(jnp.float32), p)

    samples = jnp.array([1.0, 2.0, 0.5, 1.5])
    tx = untuned(correction=correction, mask=mask)
    full, state = train(correction, tx, grad, params, samples)
    kept = {"a": params["a"]}
    alone, alone_state = train(
        correction, untuned(correction=correction), grad, kept, samples
    )
    assert_trees_equal(full, {"a": alone["a"], "frozen": params["frozen"]})
    assert_trees_equal(jax.tree.leaves(state), jax.tree.leaves(alone_state))
    other = {"a": full["a"], "frozen": jnp.arange(5) + 1}
    expected = {"a": averaged(alone_state, alone)["a"], "frozen": other["frozen"]}
    assert_trees_equal(averaged(state, other), expected)


@MODES
def test_buffers(correction):
    """Four, or three with correction; and none for what is not asked for."""

    def count(**options):
        state = untuned(correction=correction, **options).init(jnp.ones((40, 50)))
        return sum(leaf.size == 2000 for leaf in jax.tree.leaves(state))

    full = 3 if correction else 4
    assert count() == full
    assert count(average=False) == full - 1
    assert count(distance=1.0) == full - 1
    assert count(gradient=1.0) == (full if correction else full - 1)
    if not correction:
        assert isinstance(untuned().init(jnp.ones(2)), UnitsState)


@pytest.mark.parametrize("params", [{}, {"a": None}, {"a": jnp.zeros((0, 3))}, 3.0])
@pytest.mark.parametrize(("correction", "scope"), [(False, "tensor"), (True, "global")])
def test_empty_trees_and_numbers(correction, scope, params):
    moved, state = walk(correction, params=params, scope=scope)
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    assert jax.tree.structure(averaged(state, moved)) == jax.tree.structure(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_map_params_finds_the_buffers():
    tx, params = untuned(), {"a": jnp.ones(2), "b": jnp.ones(3)}
    marked = optax.tree.map_params(tx, lambda leaf: leaf * 0 + 7, tx.init(params))
    buffers = (marked.estimator, marked.gradient_unit, marked.origin, marked.average)
    assert all((leaf == 7).all() for leaf in jax.tree.leaves(buffers))
    assert float(marked.gain) == 1


# --- one transformation among others ---------------------------------------------------------


def test_clipping_before_it_in_a_chain():
    clip = optax.clip_by_global_norm(1.0)

    def clipped(p, sample):
        return clip.update(quadratic(p, sample), optax.EmptyState())[0]

    expected, expected_state = eager(untuned(), grad=clipped)
    for tx in (
        optax.chain(clip, untuned()),
        untuned(gradient_transform=clip),
    ):
        params, state = eager(tx)
        assert_trees_close(params, expected, rtol=1e-6)
        assert_trees_close(averaged(state, params), averaged(expected_state, expected), rtol=1e-6)
    plain, _ = eager(untuned())
    assert float(jnp.abs(plain["a"] - expected["a"]).max()) > 1e-4


def test_multi_steps_hands_over_the_mean_gradient():
    tx = optax.MultiSteps(untuned(), every_k_schedule=2)
    got, state = one_gradient(tx, quadratic, PARAMS, CURVATURES)[0]
    expected, expected_state = eager(untuned(), CURVATURES.reshape(-1, 2).mean(axis=1))
    assert_trees_close(got, expected, rtol=1e-6)
    assert_trees_close(averaged(state, got), averaged(expected_state, expected), rtol=1e-6)
    assert int(state.inner_opt_state.step) == 3


def test_partition_gives_each_label_units_of_its_own():
    tx = optax.partition({0: untuned(), 1: untuned(0.5)}, {"a": 0, "b": 1})
    got, state = eager(tx)
    for name, lr in [("a", 1.0), ("b", 0.5)]:
        alone, alone_state = eager(untuned(lr), params={name: PARAMS[name]})
        np.testing.assert_array_equal(got[name], alone[name])
        mean = averaged(alone_state, alone)[name]
        np.testing.assert_array_equal(averaged(state, got)[name], mean)


@MODES
def test_trees_with_holes_raise_where_grad_fn_would_meet_them(correction):
    tx = optax.masked(untuned(correction=correction), {"a": True, "b": False})
    if not correction:
        moved, _ = eager(tx, params={"a": PARAMS["a"], "b": 0 * PARAMS["b"]})
        assert float(moved["a"][0]) < 3
        return
    with pytest.raises(TypeError, match=r"holes.*pass mask= to the optimizer instead"):
        tx.init(PARAMS)


@pytest.mark.parametrize("fixed", [{}, {"distance": 0.2, "gradient": 3.0}])
def test_inject_hyperparams(fixed):
    options = {"lr": 0.3, "weight_decay": 0.01, **fixed}
    tx = optax.inject_hyperparams(untuned)(**options, scope="tensor")
    got, state = one_gradient(tx, quadratic, PARAMS, CURVATURES)[0]
    expected, expected_state = eager(untuned(**options, scope="tensor"))
    assert_trees_close(got, expected, rtol=1e-5)
    assert_trees_close(averaged(state, got), averaged(expected_state, expected), rtol=1e-5)
    assert set(options) <= set(state.hyperparams)


def test_inject_hyperparams_with_correction():
    options = {"lr": 0.3, "distance": 0.2, "gradient": 3.0}
    tx = optax.inject_hyperparams(untuned)(**options, correction=True)
    got, state = run(tx, quadratic, PARAMS, CURVATURES)
    expected, _ = walk(True, **options)
    assert_trees_close(got, expected, rtol=1e-5)
    assert set(options) <= set(state.hyperparams)


def test_compiles_once_and_scan_equals_the_loop():
    traces, tx = [], untuned(lr=lambda count: 1 / (1 + count), weight_decay=0.1)

    def grad(params, sample):
        traces.append(sample)
        return quadratic(params, sample)

    params, state, step = PARAMS, tx.init(PARAMS), step_of(tx, grad)
    for sample in CURVATURES:
        params, state = step(params, state, sample)
    assert len(traces) == 1
    scanned = one_gradient(tx, quadratic, PARAMS, CURVATURES)[0]
    assert_trees_close((params, state), scanned, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correction", [False, pytest.param(True, marks=pytest.mark.long)])
def test_vmap_over_seeds(correction):
    """One run a seed; a gradient that is not finite in one of them stays its affair."""
    scales = jnp.array([[1.0, 2.0, 3.0, 1.0], [1.0, 2.0, jnp.nan, 1.0], [2.0, 1.0, 1.0, 1.0]])
    tx = untuned(correction=correction, scope="tensor")
    together = jax.vmap(lambda s: train(correction, tx, quadratic, PARAMS, s))(scales)
    for seed in range(3):
        one = jax.tree.map(lambda leaf, seed=seed: leaf[seed], together)
        alone = walk(correction, scales[seed], scope="tensor")
        assert_trees_close(one, alone, rtol=1e-5, atol=1e-6)
    assert parts(correction, together[1])[0].skipped.tolist() == [0, 1, 0]


@MODES
def test_buffers_are_donated(correction):
    """Every buffer of the parameters and the state is reused, none twice."""
    problem, tx = Regression(), untuned(correction=correction)
    step = jax.jit(step_of(tx, problem.grad, jit=False), donate_argnums=(0, 1))
    params = problem.params(jnp.float32)
    state = tx.init(params)
    given = jax.tree.leaves((params, state))
    step(params, state, np.arange(4))  # warns, so fails, if one is not usable
    assert all(leaf.is_deleted() for leaf in given)


@MODES
def test_a_saved_tree_of_arrays_goes_on_bit_by_bit(correction):
    params, state = walk(correction, scope="tensor")
    saved = pickle.dumps([np.asarray(leaf) for leaf in jax.tree.leaves(state)])
    fresh = jax.tree.structure(compiled(correction, scope="tensor")[0].init(PARAMS))
    restored = jax.tree.map(jnp.asarray, fresh.unflatten(pickle.loads(saved)))
    assert_trees_equal(restored, state)
    assert_trees_equal(
        walk(correction, params=params, state=restored, scope="tensor"),
        walk(correction, params=params, state=state, scope="tensor"),
    )
