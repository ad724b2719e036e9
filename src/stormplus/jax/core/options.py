"""The arguments that all transformations share, checked once, and what they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, TypeAlias

import jax
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax.core.trees import Layout, PyTree, TreeOrFunction, widened
from stormplus.rules import SCOPES, check_choice

# `optax.inject_hyperparams` passes its numbers as arrays, traced or not.
Number: TypeAlias = float | jax.Array
NumberOrSchedule: TypeAlias = Number | Callable[[jax.Array], Any]


@dataclass(frozen=True)
class Options:
    """See `stormplus.jax.storm_plus` for what each one does."""

    lr: NumberOrSchedule
    weight_decay: Number
    decoupled_weight_decay: bool
    maximize: bool
    scope: str
    groups: TreeOrFunction
    mask: TreeOrFunction
    gradient_transform: Any

    def __post_init__(self) -> None:
        if not callable(self.lr):
            check_number("lr", self.lr, "the paper's is 1.0; a schedule is a function")
        check_number("weight_decay", self.weight_decay, "0.0 is none")
        check_flag("decoupled_weight_decay", self.decoupled_weight_decay)
        check_flag("maximize", self.maximize)
        check_choice("scope", self.scope, SCOPES)
        if (self.scope == "group") != (self.groups is not None):
            raise ValueError(
                "scope='group' and groups= go together (groups: a tree of labels, or a function "
                f"of the parameters), got scope={self.scope!r} and groups={self.groups!r}"
            )
        tx = self.gradient_transform
        if tx is not None and not isinstance(tx, optax.GradientTransformation):
            raise TypeError(
                "gradient_transform must be an optax transformation without state, such as "
                f"optax.clip_by_global_norm(1.0), got {tx!r}"
            )

    @staticmethod
    def of(arguments: dict[str, Any]) -> Options:
        """From the arguments of a public function: its `locals()`, before it has any other."""
        return Options(**{field.name: arguments[field.name] for field in fields(Options)})

    def layout(self, params: PyTree) -> Layout:
        return Layout(params, mask=self.mask, scope=self.scope, groups=self.groups)

    def lr_at(self, moves: jax.Array) -> Any:
        """The lr of the next move, after `moves` of them."""
        return self.lr(moves) if callable(self.lr) else self.lr

    @property
    def decays(self) -> bool:
        """Whether there may be weight decay: an array may be traced, and is not looked at."""
        return isinstance(self.weight_decay, jax.Array) or self.weight_decay != 0

    def decay(self, x: list[jax.Array], *, decoupled: bool) -> list[Any]:
        """`weight_decay` times x, of the kind asked for; zeros where there is none."""
        if not self.decays or self.decoupled_weight_decay != decoupled:
            return [0.0] * len(x)
        return [(self.weight_decay * x_i).astype(x_i.dtype) for x_i in widened(x)]

    def gradient(self, layout: Layout, g: list[jax.Array], x: list[jax.Array]) -> list[jax.Array]:
        """The gradient at x of the objective, from g, what the user's function returned."""
        if self.gradient_transform is not None:
            g = self._transformed(layout, g, x)
        if self.maximize:
            g = [-g_i for g_i in g]
        # Beyond the paper: L2 weight decay, part of the objective, so in both gradients.
        return [g_i + decay_i for g_i, decay_i in zip(g, self.decay(x, decoupled=False))]

    def _transformed(
        self, layout: Layout, g: list[jax.Array], x: list[jax.Array]
    ) -> list[jax.Array]:
        # Beyond the paper: whatever processes gradients must process both of a pair.
        tx = optax.with_extra_args_support(self.gradient_transform)
        params, gradient = layout.with_holes(x), layout.with_holes(g)
        state = tx.init(params)
        if jax.tree.leaves(state):
            raise ValueError(
                "gradient_transform must have no state, because it is applied to two gradients "
                f"a step and none of it is kept; got one with the state {state!r}"
            )
        transformed, _ = tx.update(gradient, state, params)
        leaves: list[jax.Array] = jax.tree.leaves(transformed)
        return [new.astype(old.dtype) for new, old in zip(leaves, g)]


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value: Any, hint: str) -> None:
    if isinstance(value, jax.Array):
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}; {hint}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {value!r}; {hint}")
