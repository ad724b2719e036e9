"""The table of properties that every optax optimizer is expected to have."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_problems import (
    METHODS,
    Regression,
    assert_trees_close,
    assert_trees_equal,
    run,
    step_of,
)

from stormplus.jax import storm, storm_plus

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]


def deterministic(loss):
    return lambda params, sample: jax.grad(loss)(params)


def parabola():
    target = jnp.array([1.0, -1.0, 1.0])
    return lambda x: jnp.sum((x - target) ** 2), jnp.array([-1.0, 10.0, 1.0]), target


def rosenbrock():
    return (
        lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2,
        jnp.zeros(2),
        jnp.ones(2),
    )


def two_blocks():
    target = (jnp.array([1.0, -1.0, 2.0]), jnp.array([[1.0, 0.0], [-1.0, 1.0]]))

    def loss(x):
        return sum(jnp.sum((x_i - t_i) ** 2) for x_i, t_i in zip(x, target))

    return loss, (jnp.zeros(3), jnp.zeros((2, 2))), target


# Parameter-free, but for STORM's constants and the lr with which the noiseless valley of
# Rosenbrock's function is walked in 20,000 steps.
CONVERGES = [
    (parabola, "storm+", {}),
    (parabola, "simplified-storm+", {}),
    (parabola, "storm", {"theta": 1.0, "c": 1.0}),
    (rosenbrock, "storm+", {}),
    (rosenbrock, "simplified-storm+", {"lr": 0.03}),
    (rosenbrock, "storm", {"theta": 0.1, "c": 10.0}),
    (two_blocks, "storm+", {"scope": "tensor"}),
    (two_blocks, "simplified-storm+", {"norm": "mean", "lr": 0.3}),
    (two_blocks, "storm", {"theta": 1.0, "c": 1.0}),
]


@pytest.mark.parametrize(("target", "method", "options"), CONVERGES)
def test_converges(target, method, options):
    loss, x0, expected = target()
    x, state = run(METHODS[method](**options), deterministic(loss), x0, jnp.zeros(20_000))
    assert_trees_close(x, expected, rtol=3e-2, atol=3e-2)
    assert int(state.skipped) == int(state.restarts) == 0


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", METHODS)
def test_dtypes_are_kept(method, dtype):
    """Updates and parameters have the parameters' dtype, d float32 or wider, always."""
    problem = Regression()

    def grad(params, rows):
        g = problem.grad([p.astype(jnp.float32) for p in params], rows)
        return [g_i.astype(dtype) for g_i in g]

    tx, params = METHODS[method](), problem.params(dtype)
    state = tx.init(params)
    wide = jnp.promote_types(dtype, jnp.float32)
    before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)

    @jax.jit
    def update(params, state, rows):
        return tx.update(grad(params, rows), state, params, grad_fn=lambda p: grad(p, rows))

    for rows in np.arange(12).reshape(3, 4):
        updates, state = update(params, state, rows)
        assert all(u.dtype == dtype for u in updates)
        params = optax.apply_updates(params, updates)
    assert all(d.dtype == wide for d in state.estimator)
    assert all(s.dtype == jnp.float64 for s in jax.tree.leaves(state.sum_g_sq))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state) == before
    assert all(np.isfinite(np.asarray(p, np.float64)).all() for p in params)
    assert int(state.step) == 3


def test_sums_are_float32_without_x64():
    state = storm_plus().init(jnp.ones(2))
    assert {s.dtype for s in jax.tree.leaves(state.sum_g_sq)} == {jnp.dtype("float32")}


def test_mixed_dtypes_and_a_gradient_of_another_dtype():
    params = {"half": jnp.ones(3, jnp.bfloat16), "single": jnp.ones(2)}
    params, state = run(
        storm_plus(),
        lambda p, s: {"half": s * p["half"].astype(jnp.float32), "single": s * p["single"]},
        params,
        jnp.ones(3),
    )
    assert params["half"].dtype == jnp.bfloat16
    assert params["single"].dtype == jnp.float32
    assert state.estimator["half"].dtype == jnp.float32


def test_bfloat16_keeps_what_the_parameters_cannot():
    """d in bfloat16 would lose the small corrections that line 6 sums up."""
    x = jnp.full(4, 2.0, jnp.bfloat16)
    tx = storm_plus()
    _, state = run(tx, lambda p, s: s * jnp.ones(4, jnp.bfloat16), x, jnp.array([1.0, 1 / 512]))
    a = 1 / 5 ** (2 / 3)  # |g_1|^2 = 4
    expected = 1 / 512 + (1 - a) * (1 - 1 / 512)
    np.testing.assert_allclose(state.estimator, expected, rtol=1e-6)


# --- compilation -------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_compiles_once(method):
    problem, traces = Regression(), []

    def grad(params, rows):
        traces.append(rows)
        return problem.grad(params, rows)

    tx = METHODS[method](lr=lambda count: 1 / (1 + count), weight_decay=0.1)
    params = problem.params(jnp.float32)
    state, step = tx.init(params), step_of(tx, grad)
    for rows in np.arange(20).reshape(5, 4):  # the first call and later ones alike
        params, state = step(params, state, rows)
    assert len(traces) == 2  # the two evaluations, traced once
    assert step._cache_size() == 1


def test_scan_equals_the_loop():
    problem = Regression()
    samples = jnp.asarray(np.arange(40).reshape(10, 4))
    tx, params = storm_plus(), problem.params(jnp.float32)
    scanned = run(tx, problem.grad, params, samples)
    state, step = tx.init(params), step_of(tx, problem.grad)
    for rows in samples:
        params, state = step(params, state, rows)
    assert_trees_close((params, state), scanned, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_vmap_over_seeds(scope):
    """One run a seed; a gradient that is not finite in one of them stays its affair."""
    problem, tx = Regression(), storm_plus(scope=scope)
    rows = jax.random.randint(jax.random.key(0), (3, 6, 4), 0, 64)
    bad = jnp.zeros((3, 6)).at[1, 4].set(jnp.nan)

    def grad(params, sample):
        return jax.tree.map(lambda g: g + sample[1], problem.grad(params, sample[0]))

    params = problem.params(jnp.float32)
    together = jax.vmap(lambda r, b: run(tx, grad, params, (r, b)))(rows, bad)
    for seed in range(3):
        alone = run(tx, grad, params, (rows[seed], bad[seed]))
        one = jax.tree.map(lambda leaf, seed=seed: leaf[seed], together)
        assert_trees_close(one, alone, rtol=1e-4, atol=1e-5)
    assert together[1].skipped.tolist() == [0, 1, 0]


def test_buffers_are_donated():
    """Every buffer of the parameters and the state is reused, none twice."""
    problem, tx = Regression(), storm_plus(scope="tensor")
    step = jax.jit(step_of(tx, problem.grad, jit=False), donate_argnums=(0, 1))
    params = problem.params(jnp.float32)
    state = tx.init(params)
    given = jax.tree.leaves((params, state))
    params, state = step(params, state, np.arange(4))  # warns, so fails, if one is not usable
    assert all(leaf.is_deleted() for leaf in given)
    step(params, state, np.arange(4))


# --- trees -------------------------------------------------------------------------------


def test_none_leaves():
    params = {"a": jnp.ones(2), "none": None, "nested": [None, jnp.ones(3)]}
    moved, state = run(
        storm_plus(), lambda p, s: jax.tree.map(jnp.ones_like, p), params, jnp.ones(3)
    )
    assert moved["none"] is None
    assert moved["nested"][0] is None
    assert state.estimator["none"] is None
    assert float(moved["a"][0]) < 1


@pytest.mark.parametrize(("norm", "scope"), [("raw", "global"), ("mean", "tensor")])
@pytest.mark.parametrize("params", [{}, [], (), {"a": None}, {"a": jnp.zeros((0, 3))}])
def test_empty_trees(params, norm, scope):
    tx = storm_plus(norm=norm, scope=scope)
    moved, state = run(tx, lambda p, s: p, params, jnp.ones(3))
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    assert int(state.step) == 3


def test_a_parameter_that_is_a_number():
    x, _ = run(storm_plus(), lambda p, s: p, 3.0, jnp.ones(30))
    assert abs(float(x)) < 0.5


def test_unknown_extra_arguments_are_ignored():
    tx, params = storm_plus(), jnp.ones(2)
    tx.update(params, tx.init(params), params, grad_fn=lambda p: p, value=1.0, unexpected="x")


def test_map_params_finds_the_buffer():
    """As `optax.tree.map_params` is used to shard a state like the parameters."""
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    for tx in (storm_plus(), storm_plus(mask={"a": True, "b": False}, scope="tensor")):
        state = tx.init(params)
        marked = optax.tree.map_params(tx, lambda d: d + 7, state)
        assert all((leaf == 7).all() for leaf in jax.tree.leaves(marked.estimator))
        assert_trees_equal(marked._replace(estimator=state.estimator), state)


# --- inject_hyperparams --------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_inject_hyperparams(method):
    problem, samples = Regression(), jnp.asarray(np.arange(40).reshape(10, 4))
    params = problem.params(jnp.float32)
    options = {"lr": 0.3, "weight_decay": 0.01}
    if method == "storm":
        options |= {"theta": 0.2, "c": 50.0}
    injected = optax.inject_hyperparams(METHODS[method])(**options)
    got, state = run(injected, problem.grad, params, samples)
    expected, _ = run(METHODS[method](**options), problem.grad, params, samples)
    assert_trees_close(got, expected, rtol=1e-5, atol=1e-6)
    assert set(options) <= set(state.hyperparams)


def test_an_injected_lr_can_be_changed_and_scheduled():
    tx = optax.inject_hyperparams(storm_plus)(lr=1.0)
    params = jnp.array([3.0, 4.0])
    params, state = run(tx, lambda p, s: s * p, params, jnp.ones(3))
    state.hyperparams["lr"] = jnp.float32(0.0)
    same, _ = step_of(tx, lambda p, s: s * p)(params, state, 1.0)
    np.testing.assert_array_equal(same, params)
    scheduled = optax.inject_hyperparams(storm_plus)(
        lr=lambda count: jnp.where(count < 3, 0.0, 1.0)
    )
    after = [run(scheduled, lambda p, s: s * p, params, jnp.ones(n))[0] for n in (3, 4)]
    np.testing.assert_array_equal(after[0], params)
    assert float(after[1][0]) < float(params[0])


def test_inject_hyperparams_with_a_mask_that_is_a_function():
    """It takes functions for schedules, unless told not to."""
    make = optax.inject_hyperparams(storm_plus, static_args=("mask",))
    tx = make(lr=0.5, mask=lambda p: {"a": True, "b": False})
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    moved, _ = run(tx, lambda p, s: p, params, jnp.ones(3))
    np.testing.assert_array_equal(moved["b"], 1)
    assert float(moved["a"][0]) < 1


def test_storm_constants_may_be_traced():
    """As `vmap` over a grid of them needs."""

    def final(theta):
        return run(storm(theta=theta), lambda p, s: p, jnp.ones(2), jnp.ones(5))[0]

    grid = jax.vmap(final)(jnp.array([0.1, 0.4]))
    np.testing.assert_allclose(grid[1], final(0.4), rtol=1e-6)
