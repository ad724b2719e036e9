"""What may be put around the transformations, what raises, and what is silently wrong."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_problems import assert_trees_close, assert_trees_equal, run, step_of

from stormplus.jax import accumulate, storm_plus, verify

PARAMS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
CURVATURES = jnp.array([1.0, 3.0, 2.0, 5.0])


def quadratic(x, sample):
    return jax.tree.map(lambda leaf: sample * leaf, x)


# --- raises --------------------------------------------------------------------------------


HOLES = {
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
    "partition": lambda tx: optax.partition({0: tx, 1: optax.sgd(0.1)}, {"a": 0, "b": 1}),
    "selective_transform": lambda tx: optax.transforms.selective_transform(
        tx, freeze_mask={"a": False, "b": True}
    ),
}


@pytest.mark.parametrize("wrap", HOLES.values(), ids=HOLES)
def test_trees_with_holes_raise(wrap):
    with pytest.raises(TypeError, match=r"holes.*pass mask= to the optimizer instead"):
        wrap(storm_plus()).init(PARAMS)


def test_a_wrapper_that_drops_the_extra_argument_raises():
    inner = storm_plus()
    tx = optax.GradientTransformation(inner.init, lambda g, s, p=None: inner.update(g, s, p))
    with pytest.raises(TypeError, match="None as grad_fn"):
        optax.chain(tx).update(PARAMS, (tx.init(PARAMS),), PARAMS, grad_fn=lambda p: p)


# --- works ---------------------------------------------------------------------------------


def test_a_chain_of_nothing_else():
    got, _ = run(optax.chain(storm_plus()), quadratic, PARAMS, CURVATURES)
    expected, _ = run(storm_plus(), quadratic, PARAMS, CURVATURES)
    assert_trees_equal(got, expected)


@pytest.mark.parametrize("which", [0, 1])
def test_apply_if_finite_is_not_needed_and_does_no_harm(which):
    """It sees the first gradient only; either is handled without it."""

    def grad(x, sample):
        scale, bad, x_first = sample
        first = jnp.all(x["a"] == x_first["a"])
        spoil = jnp.where(bad & (first == (which == 0)), jnp.nan, 0.0)
        return jax.tree.map(lambda leaf: scale * leaf + spoil, x)

    ends = []
    for tx in (storm_plus(), optax.apply_if_finite(storm_plus(), 3)):
        params, state, step = PARAMS, tx.init(PARAMS), step_of(tx, grad)
        for scale, bad in zip(CURVATURES, [False, False, True, False]):
            params, state = step(params, state, (scale, bad, params))
        ends.append(params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert_trees_equal(*ends)


def test_apply_if_finite_giving_up_does_not_poison():
    tx = optax.apply_if_finite(storm_plus(), 1)
    bad = jnp.array([1.0, 1.0, jnp.nan, jnp.nan, jnp.nan])
    params, state = run(tx, quadratic, PARAMS, bad)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert int(state.inner_state.skipped) == 2  # those it passed on


# --- silently wrong, and shown to be ---------------------------------------------------------


def two_points(tx, samples=CURVATURES):
    """Where the parameters go in the last call, and where grad_fn was evaluated."""
    params, state = run(tx, quadratic, PARAMS, samples[:-1])
    seen = []

    def grad_fn(p):
        seen.append(p)
        return quadratic(p, samples[-1])

    updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
    return optax.apply_updates(params, updates), seen[-1], state


def test_the_two_points_agree_alone():
    reached, evaluated, _ = two_points(storm_plus())
    assert_trees_equal(reached, evaluated)


AFTER = {
    "scale": optax.scale(0.5),
    "weight decay": optax.add_decayed_weights(-0.1),
    "clip": optax.clip(1e-3),
    "momentum": optax.trace(0.9),
}


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
def test_after_it_in_a_chain_grad_fn_is_evaluated_at_a_point_never_visited(after):
    reached, evaluated, state = two_points(optax.chain(storm_plus(), after))
    assert float(jnp.abs(reached["a"] - evaluated["a"]).max()) > 1e-3
    verify(state)  # cannot tell: the first call does not move


def test_clipping_before_it_in_a_chain_clips_one_gradient_of_the_two():
    tx = optax.chain(optax.clip_by_global_norm(1.0), storm_plus())
    _, state = run(tx, quadratic, PARAMS, CURVATURES)
    # Were both clipped, the four gradients would add up to 4 times 1.
    assert float(state[1].sum_g_sq.total) > 100
    right, right_state = run(
        storm_plus(gradient_transform=optax.clip_by_global_norm(1.0)),
        quadratic,
        PARAMS,
        CURVATURES,
    )
    np.testing.assert_allclose(right_state.sum_g_sq.total, 4, rtol=1e-5)


def micro_batches(micro):
    """Four calls of two micro-batches of curvature `micro[2 i]`, `micro[2 i + 1]`."""
    return jnp.asarray(micro).reshape(-1, 2)


def test_multi_steps_passes_the_last_micro_batch_only():
    micro = [1.0, 2.0, 3.0, 1.0, 5.0, 2.0, 1.0, 4.0]
    tx = optax.MultiSteps(storm_plus(), every_k_schedule=2)
    wrong, state = run(tx, quadratic, PARAMS, jnp.asarray(micro))
    # |g_1|^2 of the mean curvature 1.5 would be 1.5^2 * 26; the last one's is 2^2 * 26.
    _, after_two = run(tx, quadratic, PARAMS, jnp.asarray(micro[:2]))
    np.testing.assert_allclose(after_two.inner_opt_state.sum_g_sq.total, 4 * 26, rtol=1e-6)

    def mean_grad(x, pair):
        return accumulate(quadratic, pair)(x)

    right, _ = run(storm_plus(), mean_grad, PARAMS, micro_batches(micro))
    expected, _ = run(storm_plus(), quadratic, PARAMS, micro_batches(micro).mean(axis=1))
    assert_trees_close(right, expected, rtol=1e-5)
    assert float(jnp.abs(wrong["a"] - expected["a"]).max()) > 1e-3
    with pytest.raises(RuntimeError, match=r"differ at one point.*accumulate\(\)"):
        verify(state)


# --- verify ----------------------------------------------------------------------------------


def test_verify_accepts_one_sample():
    _, state = run(storm_plus(), quadratic, PARAMS, CURVATURES[:1])
    verify(state)
    assert float(state.mismatch) == 0


def test_verify_finds_a_gradient_processed_alone():
    tx = optax.chain(optax.clip_by_global_norm(1.0), storm_plus())
    _, state = run(tx, quadratic, PARAMS, CURVATURES)
    with pytest.raises(RuntimeError, match="gradient_transform= for clipping"):
        verify(state)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_verify_finds_a_key_drawn_inside_grad_fn(scope):
    """Dropout with a fresh key at each evaluation: two samples, not one."""
    keys = iter(jax.random.split(jax.random.key(0), 2))

    def grad_fn(p):
        kept = jax.random.bernoulli(next(keys), 0.5, p.shape)
        return jnp.where(kept, 2 * p, 0)

    tx, params = storm_plus(scope=scope), jnp.arange(1.0, 50.0)
    _, state = tx.update(grad_fn(params), tx.init(params), params, grad_fn=grad_fn)
    with pytest.raises(RuntimeError, match="close over the batch and the key"):
        verify(state)


def test_verify_sees_zero_gradients():
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    _, state = storm_plus().update(zero, storm_plus().init(PARAMS), PARAMS, grad_fn=lambda p: zero)
    verify(state)
    _, state = storm_plus().update(zero, storm_plus().init(PARAMS), PARAMS, grad_fn=lambda p: p)
    with pytest.raises(RuntimeError, match="differ at one point"):
        verify(state)


def test_verify_needs_a_step():
    with pytest.raises(ValueError, match="after the first update: got step 0"):
        verify(storm_plus().init(PARAMS))
    with pytest.raises(ValueError, match="no StormState in ScaleByAdamState"):
        verify(optax.scale_by_adam().init(PARAMS))


@pytest.mark.parametrize("how", ["clip", "sign", "turned around"])
def test_verify_is_not_fooled_by_equal_norms(how):
    # Clipped or signed, two gradients have one norm; and -g has that of g.
    params = {"w": jnp.array([1.0, 2.0, -3.0])}
    transform = {"clip": optax.clip_by_global_norm(0.1), "sign": optax.scale_by_sign()}.get(how)
    tx = storm_plus(gradient_transform=transform)
    first = {"w": jnp.array([3.0, -1.0, 2.0])}
    other = jax.tree.map(jnp.negative, first) if how == "turned around" else {"w": first["w"][::-1]}
    _, state = tx.update(first, tx.init(params), params, grad_fn=lambda p: other)
    with pytest.raises(RuntimeError, match="differ at one point"):
        verify(state)
    _, state = tx.update(first, tx.init(params), params, grad_fn=lambda p: first)
    verify(state)
