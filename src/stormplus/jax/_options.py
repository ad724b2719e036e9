"""The arguments that all transformations share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax._trees import OptimizedLeaves, TreeOrFunction, norm, widen
from stormplus.rules import check_unit

# `optax.inject_hyperparams` passes its numbers as arrays, traced or not.
Number: TypeAlias = float | jax.Array
NumberOrSchedule: TypeAlias = Number | Callable[[jax.Array], Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked arguments; `stormplus.jax.storm_plus` documents them."""

    lr: NumberOrSchedule = 1.0
    weight_decay: Number = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False
    unit: Number | str = 1.0
    mask: TreeOrFunction = None
    gradient_transform: optax.GradientTransformation | None = None

    def __post_init__(self) -> None:
        check_number("lr", self.lr)
        check_number("weight_decay", self.weight_decay)
        if not isinstance(self.unit, jax.Array):
            check_unit(self.unit)
        for name in ("decoupled_weight_decay", "maximize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def unit_at(self, unit: jax.Array, sum_g_sq: jax.Array, g: list[jax.Array]) -> jax.Array:
        """Return the unit of the gradient, from the stored one and a gradient of the objective."""
        if not isinstance(self.unit, str):
            return jnp.asarray(self.unit, unit.dtype)

        def first() -> jax.Array:
            size = norm(g).astype(unit.dtype)
            return jnp.where((size > 0) & jnp.isfinite(size), size, unit)

        # The sum is zero as long as all gradients have been.
        taken: jax.Array = jax.lax.cond(sum_g_sq == 0, first, lambda: unit)
        return taken

    def decay(self, x: list[jax.Array], *, decoupled: bool) -> list[Any]:
        """Return `weight_decay` times x, or zeros if weight decay is of the other kind."""
        if self.decoupled_weight_decay != decoupled or not may_decay(self.weight_decay):
            return [0.0] * len(x)
        return [(self.weight_decay * x_i).astype(x_i.dtype) for x_i in widen(x)]

    def objective_gradient(
        self, optimized: OptimizedLeaves, g: list[jax.Array], x: list[jax.Array]
    ) -> list[jax.Array]:
        """Return the gradient of what is minimized, at x, from the gradient g of the user."""
        if self.gradient_transform is not None:
            # Beyond the paper: whatever processes gradients must process both of a pair.
            tx = optax.with_extra_args_support(self.gradient_transform)
            params = optimized.tree(x)
            state = tx.init(params)
            if jax.tree.leaves(state):
                raise ValueError(
                    "gradient_transform must have no state: it is applied to both gradients of a "
                    f"pair and its state is not stored; got one with the state {state!r}"
                )
            transformed, _ = tx.update(optimized.tree(g), state, params)
            g = [new.astype(old.dtype) for new, old in zip(jax.tree.leaves(transformed), g)]
        if self.maximize:
            g = [-g_i for g_i in g]
        # Beyond the paper: L2 weight decay is part of the objective, and so in both gradients.
        return [g_i + decay_i for g_i, decay_i in zip(g, self.decay(x, decoupled=False))]


def may_decay(weight_decay: Number) -> bool:
    """Return whether there may be weight decay. An array may be traced, so it counts as yes."""
    return isinstance(weight_decay, jax.Array) or weight_decay != 0


def check_number(name: str, value: Any) -> None:
    """Raise unless `value` is a finite number >= 0, an array or a schedule."""
    if isinstance(value, jax.Array) or callable(value):
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
