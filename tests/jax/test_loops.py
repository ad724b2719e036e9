"""What helps around a loop: `verify`, `accumulate` and `uniform_iterate`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stormplus.jax import accumulate, storm_plus, uniform_iterate, verify
from tests.jax.jax_problems import (
    PARAMS,
    Regression,
    assert_trees_close,
    assert_trees_equal,
    run,
    step_of,
)

# --- verify ----------------------------------------------------------------------------------


X = jnp.arange(1.0, 50.0)
DROPOUT = [jax.random.bernoulli(jax.random.key(k), 0.5, X.shape) for k in range(2)]
CLIP, SIGN = optax.clip_by_global_norm(0.1), optax.scale_by_sign()
# Two gradients at one point that are not of one sample, and a transform of both.
DIFFERENT = {
    "a key drawn inside grad_fn": (X * DROPOUT[0], X * DROPOUT[1], None),
    "the first is zero": (0 * X, X, None),
    "turned around": (X, -X, None),
    # Their squares are no float32; clipped or signed, two gradients have one norm.
    "1e-20, turned around": (1e-20 * X, -1e-20 * X, None),
    "1e-37, turned around": (jnp.full(3, 1e-37), jnp.full(3, -1e-37), None),
    "clipped": (X, X[::-1], CLIP),
    "signed": (X - 25, X[::-1] - 25, SIGN),
}


@pytest.mark.parametrize(("first", "second", "transform"), DIFFERENT.values(), ids=DIFFERENT)
def test_verify_compares_the_first_two_gradients(first, second, transform):
    tx, params = storm_plus(gradient_transform=transform), jnp.ones_like(first)
    _, state = tx.update(first, tx.init(params), params, grad_fn=lambda p: first)
    verify(state)
    assert float(state.mismatch) == 0
    _, state = tx.update(first, tx.init(params), params, grad_fn=lambda p: second)
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    mismatch = np.linalg.norm(second - first) / (np.linalg.norm(first) or 1)
    np.testing.assert_allclose(state.mismatch, mismatch, rtol=1e-6)
    with pytest.raises(
        RuntimeError, match=r"differ at one point.*close over the batch and the key"
    ):
        verify(state)


def test_verify_needs_a_step():
    for tx in (storm_plus(), optax.scale_by_adam()):
        with pytest.raises(ValueError, match="after the first update, got"):
            verify(tx.init(PARAMS))


# --- accumulate ------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_a_run_with_accumulate_is_the_run_with_large_batches():
    problem = Regression()
    rows = jax.random.randint(jax.random.key(0), (20, 3, 4), 0, 64)
    params = problem.params()
    small = run(storm_plus(), lambda p, r: accumulate(problem.grad, r)(p), params, rows)
    large = run(storm_plus(), problem.grad, params, rows.reshape(20, 12))
    assert_trees_close(small, large, rtol=1e-9, atol=1e-12)


def test_accumulate_splits_a_tree_with_keys():
    """Dropout: the key of each micro-batch is the same in both evaluations."""

    def grad(p, batch):
        scale, key = batch
        return scale * p * jax.random.bernoulli(key, 0.5, p.shape)

    keys = jax.random.split(jax.random.key(0), 3)
    mean_grad = accumulate(grad, (jnp.array([1.0, 2.0, 3.0]), keys))
    p = jnp.arange(1.0, 5.0)
    np.testing.assert_array_equal(mean_grad(p), mean_grad(p))
    expected = sum(grad(p, (float(i + 1), keys[i])) for i in range(3)) / 3
    np.testing.assert_allclose(mean_grad(p), expected, rtol=1e-6)


def test_accumulate_adds_up_in_float32():
    """256 + 1 is 256 in bfloat16."""
    values = jnp.array([256.0] + [1.0] * 15, jnp.bfloat16)
    mean = accumulate(lambda p, v: v * jnp.ones_like(p), values)(jnp.ones(2, jnp.bfloat16))
    assert mean.dtype == jnp.float32
    np.testing.assert_array_equal(mean, 271 / 16)


def test_accumulate_leaves_integers_alone_that_a_mask_leaves_out():
    params = {"w": jnp.ones(3), "n": jnp.arange(2)}

    def loss(p, batch):
        return jnp.sum((p["w"] - batch) ** 2) + 0 * p["n"].sum()

    grad = jax.grad(loss, allow_int=True)
    tx = storm_plus(mask={"w": True, "n": False})
    batches = jnp.array([[1.0], [3.0]])
    mean_grad = accumulate(grad, batches)
    assert mean_grad(params)["n"].dtype == jax.dtypes.float0

    def step(state):
        return tx.update(mean_grad(params), state, params, grad_fn=mean_grad)

    for way in (step, jax.jit(step)):
        _, state = way(tx.init(params))  # which moves nothing yet
        verify(state)
        updates, _ = way(state)
        assert updates["n"].tolist() == [0, 0]
        assert bool((updates["w"] != 0).all())


def test_accumulate_evaluates_one_micro_batch_at_a_time():
    shapes = []

    def grad(p, batch):
        shapes.append(batch.shape)
        return p

    accumulate(grad, jnp.ones((6, 4, 2)))(jnp.ones(3))
    assert set(shapes) == {(4, 2)}


# --- uniform_iterate -------------------------------------------------------------------------


STEPS = 9


@jax.jit
def reservoir(key):
    """Which of the points 1..STEPS the stream of `key` keeps."""
    keep, points = uniform_iterate(), jnp.arange(1, STEPS + 1)
    state = keep.init(points[0] * 0)._replace(key=key)
    return jax.lax.scan(lambda s, x: (keep.update(s, x), None), state, points)[0].point


def test_the_iterate_is_uniform():
    """5000 streams over 9 points: chi^2 with 8 degrees of freedom is below 26.1 (p = 0.001)."""
    keys = jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(1), 5000))
    counts = np.bincount(jax.vmap(reservoir)(keys), minlength=STEPS + 1)
    assert counts[0] == 0
    expected = 5000 / STEPS
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 26.1


def test_equal_seeds_choose_equal_indices_whatever_the_parameters():
    keep, tx, problem = uniform_iterate(7), storm_plus(), Regression()
    params = problem.params(jnp.float32)
    state, kept, path = tx.init(params), keep.init(params), []
    step, update = step_of(tx, problem.grad), jax.jit(keep.update)
    index = int(reservoir(kept.key))
    for rows in np.arange(4 * STEPS).reshape(STEPS, 4):
        params, state = step(params, state, rows)
        kept = update(kept, params)
        path.append(params)
    assert int(kept.step) == STEPS
    assert_trees_equal(kept.point, path[index - 1])


def test_seeds_differ():
    indices = {int(reservoir(uniform_iterate(seed).init(0.0).key)) for seed in range(20)}
    assert len(indices) > 3


def test_the_iterate_can_be_donated_with_the_parameters():
    keep, params = uniform_iterate(), {"x": jnp.ones(3)}
    kept = keep.init(params)
    step = jax.jit(lambda p, k: (p, keep.update(k, p)), donate_argnums=(0, 1))
    params, kept = step(params, kept)
    params, kept = step(params, kept)
    assert int(kept.step) == 2
    assert jnp.array_equal(kept.point["x"], jnp.ones(3))


def test_the_count_of_points_stops_at_its_largest_value():
    keep = uniform_iterate()
    kept = keep.init(jnp.ones(2))._replace(step=jnp.int32(2**31 - 1))
    assert int(keep.update(kept, jnp.zeros(2)).step) == 2**31 - 1
