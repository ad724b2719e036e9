"""One call of `update`: its order, its buffer, its arguments, its errors."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_problems import METHODS, Regression, assert_trees_close, assert_trees_equal, run, step_of

from stormplus.jax import StormState, storm, storm_plus


def quadratic(x, sample):
    """The gradient of sample * |x|^2 / 2: the sample is the curvature."""
    return jax.tree.map(lambda leaf: sample * leaf, x)


def test_the_first_call_returns_zero_and_keeps_the_gradient():
    tx, params = storm_plus(), {"a": jnp.array([3.0, 4.0])}
    state = tx.init(params)
    g = quadratic(params, 2.0)
    updates, state = tx.update(g, state, params, grad_fn=lambda p: quadratic(p, 2.0))
    np.testing.assert_array_equal(updates["a"], 0)
    np.testing.assert_array_equal(state.estimator["a"], g["a"])
    # |g|^2 = 36 + 64 = 100, a = 101^(-2/3), eta = (100 / a)^(-1/3)
    a = 101 ** (-2 / 3)
    np.testing.assert_allclose(state.gain, a, rtol=1e-6)
    np.testing.assert_allclose(state.step_size, (100 / a) ** (-1 / 3), rtol=1e-6)
    assert int(state.step) == 1
    assert int(state.moves) == 0
    assert bool(state.started)


def test_the_second_evaluation_is_where_the_update_leads():
    """x_{t+1} = x_t - eta_t d_t, known before the sample; grad_fn is evaluated there."""
    tx, params = storm_plus(0.5), jnp.array([3.0, 4.0])
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


@pytest.mark.parametrize("method", METHODS)
def test_one_buffer(method):
    params = {"a": jnp.ones((40, 50)), "b": jnp.ones(60)}
    state = METHODS[method](norm="mean", weight_decay=0.1).init(params)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state))
    assert sizes[-2:] == [60, 2000]
    assert all(size == 1 for size in sizes[:-2])
    assert isinstance(state, StormState)


def test_n_equal_to_one_and_a_zero_gradient():
    """All zeros: no step, and no division by the zero norm."""
    tx, params = storm_plus(), jnp.zeros(())
    params, state = run(tx, quadratic, params, jnp.ones(3))
    assert float(params) == 0
    assert int(state.step) == 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


# --- which leaves ------------------------------------------------------------------------


MASKS = {
    "tree": {"body": {"w": True, "b": False}, "head": False},
    "prefix": {"body": True, "head": False},
    "function": lambda p: {"body": {"w": True, "b": True}, "head": p["head"].ndim > 1},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_masked_leaves_stay_and_have_no_buffer(mask, scope):
    params = {"body": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "head": jnp.arange(4)}
    kept = {"body": params["body"]} if mask is not MASKS["tree"] else {"w": params["body"]["w"]}

    def grad(p, sample):
        return jax.tree.map(lambda leaf: sample * leaf.astype(jnp.float32), p)

    samples = jnp.array([1.0, 2.0, 1.5])
    full, state = run(storm_plus(mask=mask, scope=scope), grad, params, samples)
    alone, alone_state = run(storm_plus(scope=scope), grad, kept, samples)
    assert_trees_equal(full["head"], params["head"])  # of integers, too
    left = jax.tree.leaves(state.estimator)
    assert_trees_close(left, jax.tree.leaves(alone_state.estimator), rtol=1e-6)
    np.testing.assert_allclose(full["body"]["w"], jax.tree.leaves(alone)[-1], rtol=1e-6)
    assert state.gain.shape == (() if scope == "global" else (len(left),))


def test_a_gradient_transform_acts_on_both_gradients():
    """Clipping inside equals clipping in `grad_fn`; on the optimised leaves alone."""
    samples = jnp.array([1.0, 3.0, 2.0, 5.0])
    params = {"a": jnp.array([3.0, 4.0]), "frozen": jnp.array([100.0])}

    def clipped(p, sample):
        g = quadratic({"a": p["a"]}, sample)
        return optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0]

    inside = storm_plus(
        gradient_transform=optax.clip_by_global_norm(1.0), mask={"a": True, "frozen": False}
    )
    got, state = run(inside, quadratic, params, samples)
    expected, _ = run(storm_plus(), clipped, {"a": params["a"]}, samples)
    np.testing.assert_allclose(got["a"], expected["a"], rtol=1e-6)
    np.testing.assert_allclose(state.sum_g_sq.total, 4.0, rtol=1e-5)  # 4 times 1^2


def test_a_gradient_transform_sees_the_parameters_of_its_point():
    samples = jnp.array([1.0, 3.0, 2.0, 5.0])
    params = jnp.array([3.0, 4.0])
    got, _ = run(
        storm_plus(gradient_transform=optax.add_decayed_weights(0.1)), quadratic, params, samples
    )
    expected, _ = run(storm_plus(weight_decay=0.1), quadratic, params, samples)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


# --- gradients that are not finite ---------------------------------------------------------


class Flaky:
    """The gradient of a regression, spoilt at chosen calls of `grad_fn`."""

    def __init__(self):
        self.problem = Regression()

    def __call__(self, params, sample):
        rows, bad_first, bad_second, x_first = sample
        g = self.problem.grad(params, rows)
        here = jnp.all(params[0] == x_first[0])
        bad = jnp.where(here, bad_first, bad_second)
        return [g[0].at[0, 0].add(bad), *g[1:]]


def flaky_steps(tx, bad, jit=True):
    """Run over samples; bad[i] = (added to the first gradient, added to the second)."""
    flaky = Flaky()
    step = step_of(tx, flaky, jit=jit)
    params, rng = flaky.problem.params(jnp.float32), np.random.default_rng(0)
    state, history = tx.init(params), []
    for first, second in bad:
        rows = flaky.problem.sample(rng)
        history.append((params, state))
        params, state = step(params, state, (rows, first, second, params))
    return params, state, history


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_first_gradient_that_is_not_finite_has_no_effect(value):
    params, state, history = flaky_steps(storm_plus(), [(0.0, 0.0)] * 3 + [(value, 0.0)])
    before_params, before = history[-1]
    assert_trees_equal(params, before_params)
    assert_trees_equal(state, before._replace(skipped=before.skipped + 1))


def test_a_first_gradient_of_the_first_call_that_is_not_finite_has_no_effect():
    params, state, history = flaky_steps(storm_plus(), [(np.nan, 0.0), (0.0, 0.0)])
    assert not bool(history[1][1].started)
    assert int(history[1][1].step) == 0
    assert int(state.step) == 1
    assert bool(state.started)
    assert_trees_equal(params, history[0][0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_second_gradient_that_is_not_finite_restarts_the_estimator(value, scope):
    bad = [(0.0, 0.0)] * 3 + [(0.0, value), (0.0, 0.0), (0.0, 0.0)]
    _, _, history = flaky_steps(storm_plus(scope=scope), bad)
    (x3, before), (x4, pending), (x5, restarted) = history[3:6]
    # The move stands: it depended on no gradient of that sample.
    eta = jnp.broadcast_to(before.step_size, 3)
    assert_trees_close(
        x4, [x - e * d for x, e, d in zip(x3, eta, before.estimator)], rtol=1e-6, atol=1e-7
    )
    # The sums do not.
    assert not bool(pending.started)
    assert int(pending.restarts) == 1
    assert int(pending.step) == int(before.step)
    assert int(pending.moves) == int(before.moves) + 1
    for name in ("sum_g_sq", "sum_d_sq_over_a", "gain", "step_size"):
        assert_trees_equal(getattr(pending, name), getattr(before, name))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(pending))
    # At the next call x stays, d <- g and the sums go on.
    assert_trees_equal(x5, x4)
    g = Regression().grad(x4, _rows(4))
    assert_trees_close(restarted.estimator, g, rtol=1e-5, atol=1e-7)
    norms = np.array([float(jnp.vdot(g_i, g_i)) for g_i in g])
    grown = restarted.sum_g_sq.total - before.sum_g_sq.total
    np.testing.assert_allclose(grown, norms.sum() if scope == "global" else norms, rtol=1e-4)
    assert bool(restarted.started)
    assert int(restarted.moves) == int(pending.moves)


def _rows(call):
    rng = np.random.default_rng(0)
    return [Regression().sample(rng) for _ in range(call + 1)][-1]


def test_a_restart_at_will():
    tx, params = storm_plus(), jnp.array([3.0, 4.0])
    step = step_of(tx, quadratic)
    params, state = run(tx, quadratic, params, jnp.ones(4))
    state = state._replace(started=jnp.zeros_like(state.started))
    same, again = step(params, state, 2.0)
    np.testing.assert_array_equal(same, params)
    np.testing.assert_allclose(again.estimator, 2.0 * params, rtol=1e-6)
    assert int(again.step) == 5


# --- errors ----------------------------------------------------------------------------------


def call(tx=None, *, g=None, params=None, state=None, **kwargs):
    tx = tx or storm_plus()
    params = {"a": jnp.ones(2), "b": jnp.ones((2, 2))} if params is None else params
    g = params if g is None else g
    return tx.update(g, tx.init(params) if state is None else state, params, **kwargs)


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
        r"\['b'\] is \(2, 2\), its gradient \(2,\)",
    ),
    "g_tilde of another structure": (
        {"g": [jnp.ones(2)], "grad_fn": lambda p: p},
        TypeError,
        r"the first argument of update\(\) must be a gradient with the structure",
    ),
}


@pytest.mark.parametrize(("kwargs", "error", "message"), UPDATE_ERRORS.values(), ids=UPDATE_ERRORS)
def test_update_says_what_to_pass(kwargs, error, message):
    with pytest.raises(error, match=message):
        call(**kwargs)


def test_update_needs_the_parameters():
    tx = storm_plus()
    with pytest.raises(TypeError, match="got None as params"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), grad_fn=lambda p: p)


def test_the_state_of_other_parameters_is_refused():
    state = storm_plus().init({"a": jnp.ones(3), "b": jnp.ones((2, 2))})
    with pytest.raises(ValueError, match=r"state is of other parameters.*\(3,\).*tx.init"):
        call(state=state, grad_fn=lambda p: p)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_only_real_floating_point_leaves(dtype):
    with pytest.raises(TypeError, match=r"\['a'\] is (int|complex).*mask="):
        storm_plus().init({"a": jnp.ones(2, dtype)})


ARGUMENT_ERRORS = {
    "lr negative": ({"lr": -1.0}, ValueError, "lr must be finite and not negative, got -1.0"),
    "lr nan": ({"lr": float("nan")}, ValueError, "lr must be finite"),
    "lr text": ({"lr": "1"}, TypeError, "lr must be a number, got '1'"),
    "weight_decay": ({"weight_decay": -0.1}, ValueError, "weight_decay must be .* got -0.1"),
    "norm": ({"norm": "max"}, ValueError, "norm must be one of raw, mean, got 'max'"),
    "scope": ({"scope": "leaf"}, ValueError, "scope must be one of .*, got 'leaf'"),
    "group alone": ({"scope": "group"}, ValueError, "go together.*groups=None"),
    "groups alone": ({"groups": {"a": 0}}, ValueError, "go together.*scope='global'"),
    "maximize": ({"maximize": 1}, TypeError, "maximize must be True or False, got 1"),
    "decoupled": ({"decoupled_weight_decay": 0.1}, TypeError, "decoupled_weight_decay must be"),
    "transform": ({"gradient_transform": 1.0}, TypeError, "without state.*got 1.0"),
    "transform's state": (
        {"gradient_transform": optax.trace(0.9)},
        ValueError,
        "must have no state.*TraceState",
    ),
    "mask's leaves": ({"mask": {"a": 1.0}}, TypeError, "True and False as leaves, got 1.0"),
    "mask's tree": ({"mask": {"z": True}}, ValueError, "mask must have the structure"),
    "groups' tree": (
        {"scope": "group", "groups": {"z": 0}},
        ValueError,
        "groups must have the structure",
    ),
}


@pytest.mark.parametrize(
    ("kwargs", "error", "message"), ARGUMENT_ERRORS.values(), ids=ARGUMENT_ERRORS
)
def test_arguments_are_checked(kwargs, error, message):
    with pytest.raises(error, match=message):
        call(storm_plus(**kwargs), params={"a": jnp.ones(2)}, grad_fn=lambda p: p)


def test_storm_constants_are_checked():
    with pytest.raises(ValueError, match="w must be a positive finite number, got 0"):
        storm(w=0)


def test_numpy_numbers_and_callable_masks():
    # An Equinox module of booleans is a tree, though it can be called.
    @jax.tree_util.register_pytree_node_class
    class Module(dict):
        def tree_flatten(self):
            return list(self.values()), tuple(self)

        @classmethod
        def tree_unflatten(cls, names, leaves):
            return cls(zip(names, leaves))

        def __call__(self, x):
            raise AssertionError("a mask is not called")

    params = Module(a=jnp.ones(2), b=jnp.ones(3))
    mask = jax.tree.map(lambda leaf: np.bool_(leaf.size == 3), params)
    tx = storm_plus(np.float32(0.1), mask=mask)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params, grad_fn=lambda p: p)
    assert (updates["a"] == 0).all()
    assert (updates["b"] != 0).all()
