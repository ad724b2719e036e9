"""STORM+ in measured units with one gradient a step: nothing corrects the estimator."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax.measured import UnitsOptions
from stormplus.jax.template import all_finite
from stormplus.jax.trees import Layout, PyTree, estimator_dtype, sums_dtype
from stormplus.rules import MEMORY, Sums, UnitsRule, decaying


class UnitsState(NamedTuple):
    """What is carried from call to call, with correction=False.

    Attributes:
        step: t, the gradients used.
        moves: The moves made, one a step: what a schedule is evaluated at.
        skipped: Calls without effect, because the gradient was not finite.
        distance: r_t. This and the next two have shape () with scope "global", else one entry
            a leaf or group.
        gain: a_{t+1}.
        step_size: eta_t = r_t / sqrt(t).
        estimator: d_t, like the parameters but float32 or wider.
        gradient_unit: s_t, like the estimator; None where `gradient` is fixed.
        origin: x_1, of the parameters' dtype; None where `distance` is fixed.
        average: The average of x_2..x_{t+1}, like the estimator; None with average=False.
    """

    step: jax.Array
    moves: jax.Array
    skipped: jax.Array
    distance: jax.Array
    gain: jax.Array
    step_size: jax.Array
    estimator: PyTree
    gradient_unit: PyTree
    origin: PyTree
    average: PyTree


def uncorrected(rule: UnitsRule, options: UnitsOptions) -> optax.GradientTransformationExtraArgs:
    def init(params: PyTree) -> UnitsState:
        layout = options.layout(params)

        def zeros() -> PyTree:
            leaves = [jnp.zeros_like(x_i, dtype=estimator_dtype(x_i)) for x_i in layout.x]
            return layout.with_holes(leaves)

        return UnitsState(
            step=jnp.zeros((), jnp.int32),
            moves=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            distance=options.first_distance(layout),
            gain=jnp.ones(layout.shape, sums_dtype()),
            step_size=jnp.zeros(layout.shape, sums_dtype()),
            estimator=zeros(),
            gradient_unit=zeros() if options.fixed_gradient is None else None,
            origin=options.origin(layout),
            average=options.first_average(layout),
        )

    def update(
        updates: PyTree, state: UnitsState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, UnitsState]:
        del extra_args  # meant for other transformations
        if params is None:
            raise TypeError(
                "update needs the parameters, to measure how far they have come: "
                "`tx.update(grads, state, params)`; got None as params"
            )
        layout = options.layout(params)
        x, d = layout.x, layout.estimator(state.estimator)
        handed_over = layout.gradient(updates, "the first argument of update()")
        g = options.gradient(layout, handed_over, x)

        t = (state.step + 1).astype(sums_dtype())
        r = options.next_distance(layout, state.distance, x, state.origin)
        # No formula reads the sums here, so no norm is taken of g or d.
        _, a_new, eta = rule(Sums(), 0.0, 0.0, t, r)
        # d + a (g - d), in a form whose difference cannot overflow.
        d_new = [
            (1 - a_i) * d_i + a_i * g_i for a_i, d_i, g_i in zip(layout.each(state.gain), d, g)
        ]
        s_new = _gradient_units(options, layout, jax.tree.leaves(state.gradient_unit), g, t)

        finite = all_finite((g, r))
        lr = options.lr(state.moves) if callable(options.lr) else options.lr
        step = layout.each(lr * eta)
        direction = [
            _ratio(d_i, s_i) + decay_i
            for d_i, s_i, decay_i in zip(d_new, s_new, options.decay(x, decoupled=True))
        ]
        move = layout.with_zeros(
            jnp.where(finite, -step_i * direction_i, 0).astype(x_i.dtype)
            for step_i, direction_i, x_i in zip(step, direction, x)
        )
        x_new = layout.select(jax.tree.leaves(optax.apply_updates(params, move)))

        def kept(new: Any, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old).astype(old.dtype)

        new = state._replace(
            step=state.step + 1,
            moves=state.moves + 1,
            distance=r,
            gain=jnp.broadcast_to(a_new, layout.shape),
            step_size=eta,
            estimator=layout.with_holes(d_new),
            gradient_unit=None if state.gradient_unit is None else layout.with_holes(s_new),
            average=options.next_average(layout, state.average, x_new, t),
        )
        state = jax.tree.map(kept, new, state)
        return move, state._replace(skipped=state.skipped + ~finite)

    return optax.GradientTransformationExtraArgs(init, update)


def _gradient_units(
    options: UnitsOptions,
    layout: Layout,
    s: list[jax.Array],
    g: list[jax.Array],
    t: jax.Array,
) -> list[Any]:
    if options.fixed_gradient is not None:
        return [jnp.asarray(options.fixed_gradient, g_i.dtype) for g_i in g]
    b = decaying(MEMORY, t)
    # The root is stored, not the square: 1e-20 and 1e20 have none in float32.
    old, new = (layout.each(jnp.broadcast_to(w, layout.shape)) for w in (1 - b, b))
    pairs = zip(s, g, old, new)
    return [jnp.hypot(jnp.sqrt(o) * s_i, jnp.sqrt(n) * g_i) for s_i, g_i, o, n in pairs]


def _ratio(d: jax.Array, s: jax.Array) -> jax.Array:
    # 0/0 is 0: where no gradient has been, no step is made.
    return jnp.where(s == 0, 0, d / jnp.where(s == 0, 1, s))
