"""Gradient functions of pairs: `verify` that both see one sample, `accumulate` micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from stormplus.jax._trees import PyTree, find_states, wide_dtype
from stormplus.jax.storm import StormState


def verify(state: PyTree, *, rtol: float = 1e-2) -> None:
    """Raise if the two gradients of the first step were not of the same sample.

    The first call evaluates `grad_fn` at the same point as the gradient passed to `update`, so
    the two must agree. They do not if `grad_fn` draws its own batch or key, if an `optax.chain`
    processes only one of them, or under `optax.MultiSteps`. Call it once, outside `jit`, after
    the first update.

    Args:
        state: The optimizer's state, also inside the state of a chain or a wrapper.
        rtol: The relative difference allowed for rounding.

    Raises:
        ValueError: There is no `StormState` in `state`, or no step has been made.
        RuntimeError: The gradients differ.
    """
    states = find_states(StormState, state)
    if not states or any(int(jnp.min(s.step)) == 0 for s in states):
        raise ValueError(
            "verify needs the state of storm_plus, simplified_storm_plus or storm after the first "
            f"update, got {type(state).__name__}"
        )
    for storm_state in states:
        mismatch = float(jnp.max(storm_state.mismatch))
        if mismatch > rtol:
            raise RuntimeError(
                "grad_fn and the gradient passed to update() differ at one point, by "
                f"{mismatch:.2g} relatively. Both must be of one sample (close over the batch and "
                "the key), and nothing may process only one of them: use gradient_transform= "
                "for clipping, accumulate() for micro-batches"
            )


def accumulate(
    grad_fn: Callable[[PyTree, PyTree], PyTree], batches: PyTree
) -> Callable[[PyTree], PyTree]:
    """Return the mean gradient over micro-batches, as one function of the parameters.

    Use it for both evaluations; the micro-batches together are then the sample:

        mean_grad = accumulate(jax.grad(loss), (images, labels, keys))
        updates, state = tx.update(mean_grad(params), state, params, grad_fn=mean_grad)

    It replaces `optax.MultiSteps`, which would pass the mean gradient together with the
    `grad_fn` of the last micro-batch. One micro-batch is in memory at a time.

    Args:
        grad_fn: `grad_fn(params, batch)`, the gradient of one micro-batch.
        batches: A tree whose leaves have the micro-batches along their first axis, all of the
            same length. Micro-batches have equal weights, so they should have equal sizes.

    Returns:
        A function of the parameters. Its gradients are float32 or wider.
    """

    def mean_grad(params: PyTree) -> PyTree:
        first_batch = jax.tree.map(lambda leaf: leaf[0], batches)
        one = jax.eval_shape(grad_fn, params, first_batch)

        def add(total: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            g = grad_fn(params, batch)
            return jax.tree.map(lambda t, g_i: t + g_i if _is_number(g_i) else t, total, g), None

        def zero(g: jax.Array) -> jax.Array:
            return jnp.zeros(g.shape, wide_dtype(g) if _is_number(g) else bool)

        total, _ = jax.lax.scan(add, jax.tree.map(zero, one), batches)
        count = len(jax.tree.leaves(batches)[0])
        return jax.tree.map(
            lambda t, g: t / count if _is_number(g) else np.zeros(g.shape, g.dtype), total, one
        )

    return mean_grad


def _is_number(g: jax.Array) -> bool:
    """Return False for the gradient of integers, which `mask=` leaves out: it has no numbers."""
    return g.dtype != jax.dtypes.float0
