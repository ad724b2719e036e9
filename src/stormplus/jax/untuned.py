"""`untuned`: its whole update, and the average of its iterates.

| here                      | meaning                                                    |
|---------------------------|------------------------------------------------------------|
| `x`, `d`, `s`, `r`        | x_t; d, s, r of t - 1; with `_new`: x_{t+1}, d_t, s_t, r_t |
| `a`, `b`                  | the weights of the t-th gradient in d, and in s^2          |
| `eta`                     | eta_t, in units of s                                       |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax.core.options import Number, NumberOrSchedule, Options, check_flag
from stormplus.jax.core.trees import (
    PyTree,
    TreeOrFunction,
    all_finite,
    counted,
    estimator_dtype,
    is_hole,
    sums_dtype,
    widened,
)
from stormplus.rules import (
    average_weight,
    first_distance,
    unit_weight,
    untuned_gain,
    untuned_step_size,
)


class UntunedState(NamedTuple):
    """What is carried from call to call.

    Attributes:
        step: t, the gradients used, and the moves made: what a schedule is evaluated at.
        skipped: Calls without effect, because the gradient was not finite.
        distance: r_t. This and the next have shape () with scope "global", else one entry per
            bucket.
        step_size: eta_t = r_t / sqrt(t).
        estimator: d_t, like the parameters but float32 or wider.
        unit: s_t, like the estimator.
        origin: x_1, of the parameters' dtype.
        average: The average of x_2..x_{t+1}, like the estimator; None with average=False.
    """

    step: jax.Array
    skipped: jax.Array
    distance: jax.Array
    step_size: jax.Array
    estimator: PyTree
    unit: PyTree
    origin: PyTree
    average: PyTree


# The signature is written out: `optax.inject_hyperparams` reads it.
def untuned(
    lr: NumberOrSchedule = 1.0,
    *,
    average: bool = True,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DoG's distance, RMSprop's unit and averaging: nothing to tune, one gradient per step.

    Beyond the paper: STORM+'s estimator, with its second gradient, is not in it. The run
    measures a distance r and a unit s, so that neither the scale of f nor the scale of x
    changes its course:

        r_t = max(r_{t-1}, sqrt(|x_t - x_1|^2 / n)),   r_0 = 0.01 sqrt(|x_1|^2 / n)
        d_t = d_{t-1} + a_t (g_t - d_{t-1}),           a_t = max(0.1, 1/t)
        s_t^2 = (1 - b_t) s_{t-1}^2 + b_t g_t^2,       b_t = max(0.01, 1/t), elementwise
        x_{t+1} = x_t - lr r_t / sqrt(t) d_t / s_t

    n is the number of elements that share r; r_0 is 0.01 where x_1 is zero, and 0/0 is 0.

    It is an ordinary transformation, `tx.update(grads, state, params)`, to be put last in a
    chain. The state is an `UntunedState`, with four buffers of the size of the parameters:
    the estimator, the unit, the origin x_1 and the average, which `average=False` saves. A
    gradient that is not finite has no effect but in `skipped`.

    The average is over the iterates after each call, with weights that grow like t^8, which
    is about the last tenth of the run: see `averaged`. It never influences x.

    Args:
        lr: Multiplies the step. Leave it at 1.0: r grows by the steps, and a smaller factor
            keeps it small. A number, or a schedule of the moves made before (0 at the first).
        average: Whether to keep the average.
        weight_decay: L2, part of the objective and so of g.
        decoupled_weight_decay: Instead, `weight_decay x` is added to the direction d_t / s_t.
        maximize: Ascend: the gradients change sign, the weight decay does not.
        scope: Which leaves share r: "global", "group", "tensor".
        groups: As in `storm_plus`.
        mask: As in `storm_plus`.
        gradient_transform: As in `storm_plus`; a chain does the same.
    """
    options = Options.of(locals())
    check_flag("average", average)

    def init(params: PyTree) -> UntunedState:
        layout = options.layout(params)

        def zeros() -> PyTree:
            leaves = [jnp.zeros_like(x_i, dtype=estimator_dtype(x_i)) for x_i in layout.x]
            return layout.with_holes(leaves)

        # Copies: a donated buffer must not occur twice.
        origin = layout.with_holes(jnp.array(x_i, copy=True) for x_i in layout.x)
        mean = (jnp.array(x_i, estimator_dtype(x_i), copy=True) for x_i in layout.x)
        return UntunedState(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            distance=first_distance(layout.rms(widened(layout.x))),
            step_size=jnp.zeros(layout.shape, sums_dtype()),
            estimator=zeros(),
            unit=zeros(),
            origin=origin,
            average=layout.with_holes(mean) if average else None,
        )

    def update(
        updates: PyTree, state: UntunedState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, UntunedState]:
        del extra_args  # meant for other transformations
        if params is None:
            raise TypeError(
                "update needs the parameters, to measure how far they have come: "
                "`tx.update(grads, state, params)`; got None as params"
            )
        layout = options.layout(params)
        x, d, s = layout.x, layout.estimator(state.estimator), jax.tree.leaves(state.unit)
        handed_over = layout.gradient(updates, "the first argument of update()")
        g = options.gradient(layout, handed_over, x)
        t = counted(state.step).astype(sums_dtype())

        x_1 = jax.tree.leaves(state.origin)
        away = [x_i - x_1_i for x_i, x_1_i in zip(widened(x), widened(x_1))]
        r_new = jnp.maximum(state.distance, layout.rms(away))
        eta = untuned_step_size(r_new, t)
        d_new = [_mean(d_i, g_i, untuned_gain(t)) for d_i, g_i in zip(d, g)]
        s_new = [_root_mean_square(s_i, g_i, unit_weight(t)) for s_i, g_i in zip(s, g)]

        # Beyond the paper: a gradient that is not finite has no effect.
        finite = all_finite((g, r_new))
        direction = [
            _ratio(d_i, s_i) + decay_i
            for d_i, s_i, decay_i in zip(d_new, s_new, options.decay(x, decoupled=True))
        ]
        move = layout.with_zeros(
            jnp.where(finite, -step_i * direction_i, 0).astype(x_i.dtype)
            for step_i, direction_i, x_i in zip(
                layout.each(options.lr_at(state.step) * eta), direction, x
            )
        )
        x_new = layout.select(jax.tree.leaves(optax.apply_updates(params, move)))

        average_new = None
        if state.average is not None:
            pairs = zip(jax.tree.leaves(state.average), map(_rounded, x_new))
            weight = average_weight(t)
            average_new = layout.with_holes(
                m + weight.astype(m.dtype) * (x_i - m) for m, x_i in pairs
            )

        def kept(new: Any, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old).astype(old.dtype)

        new = state._replace(
            step=counted(state.step),
            distance=r_new,
            step_size=eta,
            estimator=layout.with_holes(d_new),
            unit=layout.with_holes(s_new),
            average=average_new,
        )
        state = jax.tree.map(kept, new, state)
        return move, state._replace(skipped=counted(state.skipped, ~finite))

    return optax.GradientTransformationExtraArgs(init, update)


def averaged(state: PyTree, params: PyTree) -> PyTree:
    """The averaged parameters, to evaluate or to keep; training goes on from `params`.

    Args:
        state: The state of `untuned`, also inside the state of a chain or a wrapper.
        params: The parameters: their dtypes are taken, and the leaves that are not optimised.

    Returns:
        A tree like `params`. Before the first step it is the parameters.

    Raises:
        ValueError: There is no such state in `state`, or it was made with average=False.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, UntunedState))
    found = [node for node in nodes if isinstance(node, UntunedState)]
    if not found:
        raise ValueError(
            "averaged needs a state of untuned, also within another: "
            f"got none in {type(state).__name__}"
        )
    for one in found:
        if one.average is None:
            raise ValueError("there is no average: the state is of untuned(average=False)")
        params = jax.tree.map(_averaged_leaf, one.average, params, is_leaf=is_hole)
    return params


def _averaged_leaf(average: Any, p: Any) -> Any:
    return p if is_hole(average) else average.astype(jnp.asarray(p).dtype)


def _mean(d: jax.Array, g: jax.Array, a: jax.Array) -> jax.Array:
    # d + a (g - d), in a form whose difference cannot overflow.
    a = a.astype(d.dtype)
    return (1 - a) * d + a * g


def _root_mean_square(s: jax.Array, g: jax.Array, b: jax.Array) -> jax.Array:
    # The root is stored, not the square: 1e-20 and 1e20 have none in float32.
    old, new = (1 - b).astype(s.dtype), b.astype(s.dtype)
    return jnp.hypot(jnp.sqrt(old) * s, jnp.sqrt(new) * g)


def _ratio(d: jax.Array, s: jax.Array) -> jax.Array:
    # 0/0 is 0: where no gradient has been, no step is made.
    return jnp.where(s == 0, 0, d / jnp.where(s == 0, 1, s))


def _rounded(x: jax.Array) -> jax.Array:
    """Widened, and as x is: compiled, a sum just made would go on unrounded into the next."""
    bits = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call, unused-ignore]
    return jax.lax.reduce_precision(x.astype(estimator_dtype(x)), bits.nexp, bits.nmant)
