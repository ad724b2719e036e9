"""STORM+ in measured units: the public function, and the averaged parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax.measured import MeasuredUnits, ScalarUnits, UnitsOptions
from stormplus.jax.options import Number, NumberOrSchedule
from stormplus.jax.template import transformation
from stormplus.jax.trees import PyTree, TreeOrFunction, is_hole
from stormplus.jax.uncorrected import UnitsState, uncorrected
from stormplus.rules import CorrectedUnitsRule, UnitsRule


# The signature is written out: `optax.inject_hyperparams` reads it.
def untuned(
    lr: NumberOrSchedule = 1.0,
    *,
    correction: bool = False,
    distance: Number | None = None,
    gradient: Number | None = None,
    average: bool = True,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    norm: str = "raw",
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """STORM+ in measured units. Beyond the paper.

    The run measures a distance unit r and a gradient unit s, so that neither the scale of f
    nor the scale of x changes its course.

    With `correction=False` it is an ordinary transformation, `tx.update(grads, state, params)`,
    to be put last in a chain, with one gradient a step:

        r_t = max(r_{t-1}, sqrt(|x_t - x_1|^2 / n)),   r_0 = 0.01 sqrt(|x_1|^2 / n)
        d_t = d_{t-1} + a_t (g_t - d_{t-1}),           a_t = max(0.1, 1/t)
        s_t^2 = (1 - b_t) s_{t-1}^2 + b_t g_t^2,       b_t = max(0.01, 1/t), elementwise
        x_{t+1} = x_t - lr r_t / sqrt(t) d_t / s_t

    n is the number of elements that share r; r_0 is 0.01 where x_1 is zero, and 0/0 is 0. The
    state is a `UnitsState`, with four buffers of the size of the parameters: the estimator,
    the gradient unit, the origin x_1 and the average. `distance`, `gradient` and
    `average=False` save one each. A gradient that is not finite has no effect but in `skipped`.

    With `correction=True` it is `storm_plus`, called as that is, with `grad_fn=`, and two
    gradients a step; r and s are numbers:

        r_t = max(r_{t-1}, |x_t - x_1|),               r_0 = 0.01 |x_1|
        s_t = max(s_{t-1}, |g_t|)
        a_{t+1} = (1 + sum |g_i|^2 / s_t^2)^(-2/3)
        eta_t = r_t s_t^(-1/3) (sum |d_i|^2 / a_{i+1})^(-1/3)

    With distance=1.0 and gradient=1.0 these are the numbers of `storm_plus`. The state has its
    `StormState` as `storm`, and in `units` r, s and two buffers more, the origin and the average.

    Both modes keep the average of the points after each call, with weights that grow like
    t^8, which is about the last tenth of the run: see `averaged`. It never influences x.

    Args:
        lr: Multiplies the step, in measured units. Leave it at 1.0: r grows by the steps, and a
            smaller factor keeps it small. A number, or a schedule of the moves made before.
        correction: Whether to correct the estimator with a second gradient, as STORM+ does.
        distance: Fixes r, for the whole run. None measures it.
        gradient: Fixes s, for the whole run and every coordinate. None measures it.
        average: Whether to keep the average.
        weight_decay: L2, part of the objective and so of g.
        decoupled_weight_decay: Instead, `weight_decay x` is added to the direction, to
            d_t / s_t (with correction, to d_t), at the move.
        maximize: Ascend: the gradients change sign, the weight decay does not.
        norm: With correction, what |.|^2 means, as in `storm_plus`. Without it there is no
            effect: the distance is always divided by the number of elements.
        scope: Which leaves share r (and, with correction, s): "global", "group", "tensor".
        groups: As in `storm_plus`.
        mask: As in `storm_plus`.
        gradient_transform: As in `storm_plus`; without correction a chain does the same.
    """
    fixed = {"fixed_distance": distance, "fixed_gradient": gradient}
    options = UnitsOptions.of(locals() | fixed)
    if correction:
        return transformation(CorrectedUnitsRule(), options, MeasuredUnits(options))
    return uncorrected(UnitsRule(), options)


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
    kinds = (UnitsState, ScalarUnits)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    found = [node for node in nodes if isinstance(node, kinds)]
    if not found:
        raise ValueError(
            "averaged needs a state of untuned, also within another: "
            f"got none in {type(state).__name__}"
        )
    for units in found:
        if units.average is None:
            raise ValueError("there is no average: the state is of untuned(average=False)")
        params = jax.tree.map(_averaged_leaf, units.average, params, is_leaf=is_hole)
    return params


def _averaged_leaf(average: Any, p: Any) -> Any:
    return p if is_hole(average) else average.astype(jnp.asarray(p).dtype)
