"""STORM+, simplified STORM+ and STORM: the public functions."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax.options import Number, NumberOrSchedule, Options
from stormplus.jax.template import transformation
from stormplus.jax.trees import TreeOrFunction
from stormplus.rules import SimplifiedStormPlusRule, StormPlusRule, StormRule


# The signatures are written out: `optax.inject_hyperparams` reads them.
def storm_plus(
    lr: NumberOrSchedule = 1.0,
    *,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    norm: str = "raw",
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """STORM+, Algorithm 1.

    `tx.update(g_tilde, state, params, grad_fn=grad_fn)`: `grad_fn` is a function of the
    parameters that returns the gradient on this call's sample, and `g_tilde` is
    `grad_fn(params)`. The first call returns a zero update. Nothing may be chained before
    or after it: what would be is an argument here.

    Args:
        lr: Multiplies eta_t in the move and enters no rule: a number, or a schedule of the
            moves made before (0 at the first).
        weight_decay: L2, part of the objective: in both gradients, and so in the norms.
        decoupled_weight_decay: Instead, `x <- x - lr eta_t (d + weight_decay x)`.
        maximize: Ascend: the gradients change sign, the weight decay does not.
        norm: What |.|^2 means in the rules: "raw" (the paper), or "mean": divided by the
            number of optimised elements that share the sums.
        scope: Which leaves share the sums: "global" (the paper), "group", "tensor".
        groups: With scope "group", a tree of labels (or a prefix of one, or a function of
            the parameters that returns one): leaves of one label share the sums.
        mask: A tree of booleans (or a prefix, or a function): which leaves are optimised.
            The others get a zero update and have no buffer.
        gradient_transform: A stateless optax transformation such as clipping, applied to
            both gradients of the optimised leaves, before the weight decay.
    """
    return transformation(StormPlusRule(), Options.of(locals()))


def simplified_storm_plus(
    lr: NumberOrSchedule = 1.0,
    *,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    norm: str = "raw",
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Simplified STORM+, Sec. 4.2: a_{t+1} = t^(-2/3). The arguments are `storm_plus`'s."""
    return transformation(SimplifiedStormPlusRule(), Options.of(locals()))


def storm(
    lr: NumberOrSchedule = 1.0,
    *,
    theta: Number = 0.1,
    w: Number = 0.1,
    c: Number = 100.0,
    smoothness: Number = 1.0,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    norm: str = "raw",
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """STORM (Cutkosky & Orabona 2019).

    `theta` is the numerator of the step size, `w` the offset under its cube root, `c` the
    factor of the gain, `smoothness` the L of the objective, all positive. The other
    arguments are `storm_plus`'s.
    """
    return transformation(
        _storm_rule(theta=theta, w=w, c=c, smoothness=smoothness), Options.of(locals())
    )


class _TraceableStormRule(StormRule):
    """STORM's rule with constants that may be arrays, whose values cannot be checked."""

    def __post_init__(self) -> None:
        constants = {field.name: getattr(self, field.name) for field in fields(self)}
        known = {k: v for k, v in constants.items() if not isinstance(v, jax.Array)}
        StormRule(**known)  # raises


def _storm_rule(**constants: Any) -> StormRule:
    return _TraceableStormRule(**constants)
