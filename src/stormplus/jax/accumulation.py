"""`accumulate`: one large sample from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stormplus.jax.trees import PyTree, estimator_dtype


def accumulate(
    grad_fn: Callable[[PyTree, PyTree], PyTree], batches: PyTree
) -> Callable[[PyTree], PyTree]:
    """The mean gradient over micro-batches, as one function of the parameters.

    Use it for both evaluations; the micro-batches together are then the sample:

        mean_grad = accumulate(jax.grad(loss), (images, labels, keys))
        updates, state = tx.update(mean_grad(params), state, params, grad_fn=mean_grad)

    It takes the place of `optax.MultiSteps`, which would hand over the mean gradient with
    the `grad_fn` of the last micro-batch. One micro-batch is in memory at a time.

    Args:
        grad_fn: `grad_fn(params, batch)`, the gradient of one micro-batch.
        batches: A tree whose leaves have the micro-batches along their first axis, of one
            length. Micro-batches weigh the same, so they should be of one size.

    Returns:
        A function of the parameters. Its gradients are float32 or wider.
    """
    if not callable(grad_fn):
        raise TypeError(f"grad_fn must be a function of (params, batch), got {grad_fn!r}")
    leaves = jax.tree.leaves(batches)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            "batches must have the micro-batches along the first axis of every leaf, of one "
            f"length, at least 1; got the shapes {shapes}"
        )
    ((count,),) = lengths

    def mean_grad(params: PyTree) -> PyTree:
        def widened(batch: PyTree) -> PyTree:
            gradient = grad_fn(params, batch)
            return jax.tree.map(lambda g: g.astype(estimator_dtype(g)), gradient)

        def add(total: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, widened(batch)), None

        one = jax.eval_shape(widened, jax.tree.map(lambda leaf: leaf[0], batches))
        zero = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), one)
        total, _ = jax.lax.scan(add, zero, batches)
        return jax.tree.map(lambda g: g / count, total)

    return mean_grad
