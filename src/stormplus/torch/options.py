"""The arguments of an optimizer, checked, with errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from stormplus.torch.state import CODES


@dataclass(frozen=True)
class Options:
    """What holds for the whole optimizer; the rest is per parameter group."""

    norm: str = "raw"
    scope: str = "global"
    replay_rng: bool | Iterable[torch.Generator] = True
    check_finite: bool = True

    def __post_init__(self) -> None:
        for name in ("norm", "scope"):
            value, choices = getattr(self, name), CODES[name]
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if isinstance(self.replay_rng, bool):
            return
        given: Any = self.replay_rng
        generators = tuple(given) if isinstance(given, Iterable) else (given,)
        for generator in generators:
            if not isinstance(generator, torch.Generator):
                raise TypeError(
                    "replay_rng must be True, False or a list of torch.Generator, "
                    f"got {generator!r}"
                )
        object.__setattr__(self, "replay_rng", generators)

    @property
    def replay(self) -> bool:
        """Whether random numbers are replayed: torch's own, whatever is named beside them."""
        return self.replay_rng is not False

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Random streams of the user's own, replayed beside torch's."""
        return () if isinstance(self.replay_rng, bool) else tuple(self.replay_rng)

    def __deepcopy__(self, memo: Any) -> Options:
        return self  # a copy of an optimizer replays the user's generators, not copies of them


def check_group(group: dict[str, Any]) -> None:
    """Refuse a parameter group's options if they make no sense."""
    lr, decay, bound = group["lr"], group["weight_decay"], group["max_move"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"a tensor lr must have one element, got the shape {tuple(lr.shape)}")
    if not (isinstance(lr, (Real, torch.Tensor)) and 0 <= float(lr) < math.inf):
        raise ValueError(f"lr must be a finite number, at least 0, got {lr!r}; the paper's is 1.0")
    if not (isinstance(decay, Real) and 0 <= float(decay) < math.inf):
        raise ValueError(f"weight_decay must be a finite number, at least 0, got {decay!r}")
    if bound is not None and not (isinstance(bound, Real) and 0 < float(bound) < math.inf):
        raise ValueError(f"max_move must be a positive number or None (no bound), got {bound!r}")
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach and fused are two ways of doing the same: ask for one of them")
    for p in group["params"]:
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"parameters must be floating point or complex, got {p.dtype}")
        if p.is_conj() or p.is_neg():
            raise ValueError("a parameter is a conjugate or negative view: clone() it first")
        if any(step == 0 and size > 1 for step, size in zip(p.stride(), p.shape)):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is an expanded view, whose elements share "
                "memory: clone() it, or optimize what it is a view of"
            )


def closure_needed(name: str) -> str:
    return (
        f"{name} takes the gradient twice on the same sample, so step() needs a closure:\n"
        "    def closure():\n"
        "        opt.zero_grad(); loss = loss_fn(model(x), y); loss.backward(); return loss\n"
        "    opt.step(closure)\n"
        "In a loop that owns its backward passes use opt.move() and opt.estimate() instead; "
        "with a GradScaler, stormplus.scaled_step(opt, scaler, closure, model); inside a trainer, "
        "stormplus.integrations."
    )
