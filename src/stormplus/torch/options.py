"""The arguments of an optimizer, checked, with errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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
    max_move: float | None = None

    def __post_init__(self) -> None:
        for name in ("norm", "scope"):
            value, choices = getattr(self, name), CODES[name]
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.max_move is not None and not 0 < self.max_move < math.inf:
            raise ValueError(
                f"max_move must be a positive number or None (no bound), got {self.max_move!r}"
            )
        if not isinstance(self.replay_rng, bool):
            object.__setattr__(self, "replay_rng", tuple(self.replay_rng))
        for generator in self.generators:
            if not isinstance(generator, torch.Generator):
                raise TypeError(
                    "replay_rng must be True, False or a list of torch.Generator, "
                    f"got an item {generator!r}"
                )

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Random streams of the user's own, replayed beside torch's."""
        return () if isinstance(self.replay_rng, bool) else tuple(self.replay_rng)


def check_group(group: dict[str, Any]) -> None:
    """Refuse a parameter group's options if they make no sense."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"a tensor lr must have one element, got the shape {tuple(lr.shape)}")
    for name in ("lr", "weight_decay"):
        value = group[name]
        if not (isinstance(value, (int, float, torch.Tensor)) and 0 <= float(value) < math.inf):
            raise ValueError(
                f"{name} must be a finite number, at least 0, got {value!r}"
                + ("; the paper's is 1.0" if name == "lr" else "")
            )
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach and fused are two ways of doing the same: ask for one of them")
    for p in group["params"]:
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"parameters must be floating point or complex, got {p.dtype}")


def closure_needed(name: str) -> str:
    return (
        f"{name} takes the gradient twice on the same sample, so step() needs a closure:\n"
        "    def closure():\n"
        "        opt.zero_grad(); loss = loss_fn(model(x), y); loss.backward(); return loss\n"
        "    opt.step(closure)\n"
        "In a loop that owns its backward passes use opt.move() and opt.estimate() instead; "
        "with a GradScaler, stormplus.scaled_step(opt, scaler, closure, model)."
    )
