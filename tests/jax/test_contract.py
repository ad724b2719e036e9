"""The table: every transformation, every property that an optax optimizer should have."""

import functools
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormplus import minimize
from stormplus.jax import StormState, UntunedState, uniform_iterate
from stormplus.untuned_rule import INTERPOLATION
from tests.jax.jax_problems import (
    BUFFERS,
    CURVATURES,
    PAIRED,
    PARAMS,
    RATE,
    REFERENCE,
    TRANSFORMATIONS,
    assert_finite,
    assert_trees_close,
    assert_trees_equal,
    quadratic,
    run,
    step_of,
    the_sample,
    walk,
)

each = pytest.mark.parametrize("name", TRANSFORMATIONS)
paired = pytest.mark.parametrize("name", PAIRED)
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


# --- compiled, in whatever way ---------------------------------------------------------------


@each
def test_it_compiles_once_and_scan_equals_the_loop(name):
    traces, rate = [], {RATE[name]: lambda count: 1 / (1 + count)}
    tx = TRANSFORMATIONS[name](**rate, weight_decay=0.1)

    def grad(params, sample):
        traces.append(sample)
        return quadratic(params, sample)

    step, params, state = step_of(tx, grad), PARAMS, tx.init(PARAMS)
    for sample in CURVATURES:  # the first call and later ones alike
        params, state = step(params, state, sample)
    assert len(traces) == (2 if name in PAIRED else 1)
    assert step._cache_size() == 1
    assert_trees_close(run(tx, quadratic, PARAMS, CURVATURES), (params, state), **ROUNDING)


@pytest.mark.long
@each
def test_vmap_over_seeds_and_rates(name):
    """One run each; a gradient that is not finite in one of them stays its affair."""
    scales = jnp.array([[1.0, 2.0, 3.0, 1.0], [1.0, 2.0, jnp.nan, 1.0], [2.0, 1.0, 1.0, 1.0]])

    def final(scales, lr):
        return run(TRANSFORMATIONS[name](**{RATE[name]: lr}), quadratic, PARAMS, scales)

    together = jax.vmap(final)(scales, jnp.array([1.0, 1.0, 0.4]))
    for i, lr in enumerate((1.0, 1.0, 0.4)):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        alone = walk(name, scales[i], **{RATE[name]: lr})
        assert_trees_close(one, alone, **ROUNDING)
    assert together[1].skipped.tolist() == [0, 1, 0]


@each
def test_buffers_are_donated(name):
    """Every buffer of the parameters and the state is reused, none twice."""
    tx = TRANSFORMATIONS[name]()
    step = jax.jit(step_of(tx, quadratic, jit=False), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    given = jax.tree.leaves((params, state))
    params, state = step(params, state, 1.0)  # warns, so fails, if one is not usable
    assert all(leaf.is_deleted() for leaf in given)
    step(params, state, 1.0)


@pytest.mark.long
@each
def test_eager_calls_in_a_chain_with_other_arguments_change_nothing(name):
    tx = optax.chain(TRANSFORMATIONS[name]())
    arguments = {"grad_fn": lambda p: quadratic(p, 2.0), "value": 1.0, "unexpected": "x"}
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(quadratic(params, 2.0), state, params, **arguments)
        params = optax.apply_updates(params, updates)
    assert_trees_close(params, walk(name, [2.0, 2.0])[0], **ROUNDING)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
@each
def test_gradients_flow_through_a_run(name):
    """Meta-gradients, also where x is at its origin and where a gradient is zero."""
    first = {"a": jnp.array([3.0, 4.0, 0.0]), "zero": jnp.zeros(2)}

    @jax.jit
    def end(lr):
        tx = TRANSFORMATIONS[name](**{RATE[name]: lr})
        moved, _ = run(tx, quadratic, jax.tree.map(lambda p: p * lr, first), CURVATURES[:4])
        return jnp.sum(moved["a"] ** 2)

    slope = (end(0.5 + 1e-6) - end(0.5 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(end)(0.5), slope, rtol=1e-6)


# --- trees -----------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


@each
def test_the_kind_of_tree_does_not_matter(name):
    tree = {"none": None, "pair": Pair([None, {"y": PARAMS["a"]}], (PARAMS["b"],))}
    moved, state = walk(name, params=tree)
    assert jax.tree.structure(moved) == jax.tree.structure(tree)
    for buffer in BUFFERS[name]:
        assert jax.tree.structure(getattr(state, buffer)) == jax.tree.structure(tree)
    expected = jax.tree.leaves(walk(name)[0])
    assert_trees_close(jax.tree.leaves(moved), expected, **ROUNDING)


def half_dead(p, sample):
    return {"dead": 0 * p["dead"], "live": sample * p["live"]}


# Parameters, their gradient, and whether each leaf moves.
TREES = {
    "empty": ({}, quadratic, []),
    "no elements": ({"a": None, "b": jnp.zeros((0, 3))}, quadratic, [False]),
    "a number": (3.0, quadratic, [True]),
    "zero": (0.0, quadratic, [False]),  # and no division by the norm
    "a dead leaf": ({"dead": jnp.array([2.0, 0.0]), "live": jnp.ones(2)}, half_dead, [False, True]),
}


@pytest.mark.parametrize("case", TREES.values(), ids=TREES)
@each
def test_small_trees_and_zero_gradients(name, case):
    params, grad, moves = case
    options = {"unit": "first"} if name in PAIRED else {}
    moved, state = walk(name, CURVATURES, params, grad=grad, **options)
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(params))
    assert [bool(np.any(new != old)) for new, old in pairs] == moves
    assert int(state.step) == len(CURVATURES)
    assert_finite((moved, state))


@each
def test_counters_stop_at_their_largest_value(name):
    """2^31 calls: a count that wrapped around made t negative, and the parameters NaN."""
    params, state = walk(name)
    largest = jnp.int32(2**31 - 1)
    names = ("step", "moves", "skipped", "restarts")
    counts = {key: largest for key in names if key in state._fields}
    params, state = walk(name, [1.0, np.nan, 2.0], params, state._replace(**counts))
    assert_finite((params, state))
    assert all(getattr(state, key) == largest for key in counts)


@each
def test_the_buffers(name):
    """One of the size of the parameters for pairs, two for untuned; `map_params` finds them."""
    make, params = TRANSFORMATIONS[name], {"a": jnp.ones((400, 500)), "b": jnp.ones(100_000)}
    for tx, count in ((make(weight_decay=0.1), 2), (make(mask={"a": True, "b": False}), 1)):
        state = tx.init(params)
        assert type(state) is (StormState if name in PAIRED else UntunedState)
        sizes = [leaf.size for leaf in jax.tree.leaves(state)]
        assert sum(size >= 100_000 for size in sizes) == count * len(BUFFERS[name])
        assert sum(size for size in sizes if size < 100_000) < 10_000  # the sample, if any
        marked = optax.tree_utils.tree_map_params(tx, lambda leaf: 0 * leaf + 7, state)
        for buffer in BUFFERS[name]:
            assert all((leaf == 7).all() for leaf in jax.tree.leaves(getattr(marked, buffer)))
        rest = {buffer: getattr(state, buffer) for buffer in BUFFERS[name]}
        assert_trees_equal(marked._replace(**rest), state)


# --- which leaves ----------------------------------------------------------------------------


def cast_quadratic(p, sample):
    return jax.tree.map(lambda leaf: sample * leaf.astype(jnp.float32), p)


@each
def test_masked_leaves_stay_and_have_no_buffer(name):
    params = {"body": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "head": jnp.arange(4)}
    make = TRANSFORMATIONS[name]
    prefix = make(mask={"body": True, "head": False})
    moved, state = run(prefix, cast_quadratic, params, CURVATURES)
    kept = {"body": params["body"]}
    alone, alone_state = walk(name, params=kept, grad=cast_quadratic)
    assert_trees_equal(moved["head"], params["head"])  # of integers, too
    assert_trees_close(state, alone_state, **ROUNDING)
    assert_trees_close(moved["body"], alone["body"], **ROUNDING)
    assert state.step_size.shape == (() if name in PAIRED else (2,))
    function = make(mask=lambda p: {"body": True, "head": p["head"].ndim > 1})
    assert_trees_equal(function.init(params), prefix.init(params))
    tree = make(mask={"body": {"w": True, "b": False}, "head": False}).init(params)
    for buffer in BUFFERS[name]:
        assert [leaf.shape for leaf in jax.tree.leaves(getattr(tree, buffer))] == [(2, 3)]


@each
def test_numpy_numbers_and_trees_that_can_be_called(name):
    # An Equinox module of booleans or of factors is a tree, though it can be called.
    @jax.tree_util.register_pytree_node_class
    class Module(dict):
        def tree_flatten(self):
            return list(self.values()), tuple(self)

        @classmethod
        def tree_unflatten(cls, names, leaves):
            return cls(zip(names, leaves))

        def __call__(self, x):
            raise AssertionError("neither a function of the parameters nor a schedule")

    params = Module(a=jnp.ones(2), b=jnp.ones(3))
    mask = jax.tree.map(lambda leaf: np.bool_(leaf.size == 3), params)
    rate = np.float32(0.1)
    if name == "untuned":
        rate = jax.tree.map(lambda _: np.float32(0.1), params)
    tx = TRANSFORMATIONS[name](**{RATE[name]: rate}, mask=mask)
    moved, _ = run(tx, quadratic, params, jnp.ones(2))
    assert (moved["a"] == 1).all()
    assert (moved["b"] < 1).all()


# --- dtypes ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
@each
def test_dtypes_are_kept(name, dtype):
    """Updates and parameters have the parameters' dtype, buffers float32 or wider, always."""
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    tx = TRANSFORMATIONS[name]()
    state = tx.init(params)
    updates, after = jax.eval_shape(
        lambda p, s: tx.update(p, s, p, grad_fn=lambda x: x), params, state
    )
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(updates))
    kinds = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)
        for tree in (state, after)
    ]
    assert kinds[0] == kinds[1]
    wide = jnp.promote_types(dtype, jnp.float32)
    for buffer in BUFFERS[name]:
        assert all(leaf.dtype == wide for leaf in jax.tree.leaves(getattr(state, buffer)))
    assert state.step_size.dtype == jnp.float64


@each
def test_mixed_dtypes_and_a_gradient_of_another_dtype(name):
    params = {"half": jnp.ones(3, jnp.bfloat16), "single": jnp.ones(2)}
    moved, state = walk(name, params=params, grad=cast_quadratic)
    assert_finite((moved, state))
    assert float(moved["half"][0]) < 1
    assert moved["half"].dtype == jnp.bfloat16
    buffer = getattr(state, BUFFERS[name][0])
    assert moved["single"].dtype == buffer["half"].dtype == jnp.float32
    assert state.step_size.dtype == jnp.float32  # without x64


# --- sizes, from 0 to 1e20; those of untuned are in test_untuned.py ---------------------------

SIZES = [0.0, 1e-20, 1e-12, 1e-4, 1.0, 1e5, 1e10, 1e15, 1e20]
FACTORS = np.array([1.0, -0.5, 2.0, 0.0, 1.0])
# In float32 the rules see |g|^2 as zero below the first number; beyond the second the sum of
# |d|^2 / a (whose a simplified STORM+ keeps large), and from 2e19 |g|^2 itself, is too large. Such
# gradients are not used, and counted.
SMALLEST = 1e-19
LARGEST = {"storm_plus": 1e11, "simplified_storm_plus": 1e16, "storm": 1e11}


@pytest.mark.parametrize("size", SIZES)
@paired
def test_float32_is_the_reference_or_does_nothing(name, size):
    """A linear objective, whose gradient is g times a factor.

    Never an inf, a NaN, or a step that only overflow explains.
    """
    g = size * np.array([1, 1.5, 2]) / np.linalg.norm([1, 1.5, 2])
    samples = jnp.asarray(np.outer(FACTORS, g), jnp.float32)
    x, state = walk(name, samples, params=jnp.zeros(3), grad=the_sample)
    factors = iter(FACTORS)
    expected = minimize(
        lambda x, xi: xi * g,
        np.zeros(3),
        lambda rng: next(factors),
        len(FACTORS),
        method=REFERENCE[name],
    ).x
    assert_finite((x, state))
    if size < SMALLEST:  # eta = 1: steps are as small as the gradients
        np.testing.assert_allclose(x, 0, atol=1e-19)
    elif size <= LARGEST[name]:
        np.testing.assert_allclose(x, expected, rtol=1e-4)
        assert int(state.step) == len(FACTORS)
    else:
        np.testing.assert_array_equal(x, 0)
        assert int(state.skipped) + int(state.restarts) >= 3  # the factor 0 is in range


@functools.cache
def scales_sweep(name):
    tx = TRANSFORMATIONS[name]()
    return jax.jit(lambda g, scales: run(tx, lambda x, s: s * g, jnp.zeros(4), scales))


@each
@settings(max_examples=25, deadline=None)
@given(
    exponents=st.lists(st.floats(-30, 25), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_any_sequence_of_sizes_leaves_the_state_finite(name, exponents, seed):
    g = jnp.asarray(np.random.default_rng(seed).standard_normal(4), jnp.float32)
    scales = np.zeros(6, np.float32)
    scales[: len(exponents)] = [10.0**e for e in exponents]
    x, state = scales_sweep(name)(g, jnp.asarray(scales))
    assert_finite((x, state))
    assert int(state.step) + int(state.skipped) + int(getattr(state, "restarts", 0)) == 6


# --- gradients that are not finite -----------------------------------------------------------


def spoilt(p, sample):
    scale, bad = sample
    g = quadratic(p, scale)
    return {"a": g["a"].at[1].add(bad), "b": g["b"]}


SPOILT = {name: {"decoupled_weight_decay": True} for name in PAIRED}
SPOILT |= {"untuned": {"state_dtype": jnp.bfloat16}}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("before", [0, 3])
@each
def test_a_gradient_that_is_not_finite_has_no_effect(name, before, value):
    options = SPOILT[name] | {"grad": spoilt, "weight_decay": 0.1}
    params, state = walk(name, [(c, 0.0) for c in CURVATURES[:before]], **options)
    after_params, after = walk(name, [(1.0, value)], params, state, **options)
    assert_trees_equal(after_params, params)
    assert_trees_equal(after, state._replace(skipped=state.skipped + 1))


# --- the objective ---------------------------------------------------------------------------


@each
def test_a_gradient_transform_is_as_if_the_gradient_were_so(name):
    """On the optimized leaves alone, each gradient with the parameters of its point."""
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1))

    def by_hand(p, sample):
        g = sample * p["a"]
        return {"a": g / jnp.maximum(jnp.linalg.norm(g), 1) + 0.1 * p["a"]}

    params = {"a": PARAMS["a"], "frozen": jnp.array([100.0])}
    tx = TRANSFORMATIONS[name](gradient_transform=transform, mask={"a": True, "frozen": False})
    got, state = run(tx, quadratic, params, CURVATURES)
    expected, expected_state = walk(name, params={"a": params["a"]}, grad=by_hand)
    assert_trees_close(got["a"], expected["a"], **ROUNDING)
    assert_trees_close(state, expected_state, **ROUNDING)


# --- schedules and injected numbers ----------------------------------------------------------


def fast(params, state):
    """What a step moves: of untuned z, which the parameters follow."""
    z_minus_x = getattr(state, "z_minus_x", None)
    return params["a"] if z_minus_x is None else params["a"] + INTERPOLATION * z_minus_x["a"]


def no_second_move(count):
    return jnp.where(count == 1, 0.0, 1.0)


@each
def test_a_schedule_counts_moves(name):
    """From 0; the first call of pairs and a call without effect do not count."""
    params, state, moved = PARAMS, None, []
    for sample in (1.0, np.nan, 2.0, 3.0, 1.0):
        before = params["a"] if state is None else fast(params, state)
        params, state = walk(name, [sample], params, state, **{RATE[name]: no_second_move})
        moved.append(float(jnp.abs(fast(params, state) - before).max()) > 1e-5)
    if name in PAIRED:
        assert moved == [False, False, True, False, True]
    else:
        assert moved == [True, False, False, True, True]


@pytest.mark.long
@each
def test_inject_hyperparams(name):
    options = {RATE[name]: 0.3, "weight_decay": 0.01}
    if name == "storm":
        options |= {"theta": 0.2, "c": 50.0}
    make = TRANSFORMATIONS[name]
    # It takes functions for schedules, unless told not to.
    tx = optax.inject_hyperparams(make, static_args=("mask",))(
        **options, mask=lambda p: {"a": True, "b": True}
    )
    step, params, state = step_of(tx, quadratic), PARAMS, tx.init(PARAMS)
    for sample in CURVATURES:
        params, state = step(params, state, sample)
    expected, _ = walk(name, **options)
    assert_trees_close(params, expected, **ROUNDING)
    assert set(options) <= set(state.hyperparams)
    before = fast(params, state.inner_state)
    state.hyperparams[RATE[name]] = jnp.float32(0.0)
    params, state = step(params, state, 1.0)
    rounding = 0 if name in PAIRED else 1e-6  # z is not stored
    np.testing.assert_allclose(fast(params, state.inner_state), before, rtol=rounding)


@each
def test_an_injected_schedule_counts_calls(name):
    tx = optax.inject_hyperparams(TRANSFORMATIONS[name])(
        **{RATE[name]: lambda count: jnp.where(count < 3, 0.0, 1.0)}
    )
    step, params, state, moved = step_of(tx, quadratic), PARAMS, tx.init(PARAMS), []
    for _ in range(4):
        params, state = step(params, state, 1.0)
        moved.append(float(params["a"][0]) < 3)
    assert moved == [False, False, False, True]


# --- checkpoints -----------------------------------------------------------------------------


def by_pickle(saved, template, path):
    leaves = pickle.loads(pickle.dumps([np.asarray(leaf) for leaf in jax.tree.leaves(saved)]))
    return jax.tree.map(jnp.asarray, jax.tree.structure(template).unflatten(leaves))


def by_orbax(saved, template, path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "checkpoint", template)


@each
def test_a_state_goes_through_a_checkpoint_bit_by_bit(name, tmp_path):
    dtype = jnp.bfloat16 if name in ("storm_plus", "untuned") else jnp.float32
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    mask = {"a": True, "b": dtype == jnp.bfloat16}
    tx = TRANSFORMATIONS[name](mask=mask)
    step, keep = step_of(tx, quadratic), uniform_iterate()
    template = {"params": params, "state": tx.init(params), "kept": keep.init(params)}
    moved, state = params, template["state"]
    for sample in CURVATURES[:3]:
        moved, state = step(moved, state, sample)
    saved = {"params": moved, "state": state, "kept": keep.update(template["kept"], moved)}
    straight = step(moved, state, CURVATURES[3])
    for way in (by_pickle, by_orbax):
        restored = way(saved, template, tmp_path)
        assert_trees_equal(restored, saved)
        assert type(restored["state"]) is type(state)
        assert_trees_equal(step(restored["params"], restored["state"], CURVATURES[3]), straight)
