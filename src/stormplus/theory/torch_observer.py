"""The observer's torch face: it stands around the two halves of a step.

`step(closure)` and the pair `move()`, `estimate()` both go through the optimizer's two
internal halves. While attached, the observer replaces them on this one instance by
wrappers; detached, the optimizer is as it was, so watching costs nothing when off.

Attached it holds one more buffer than the optimizer (g_t), and two between the halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stormplus.theory.observer import Attachment, Observer


class TorchAttachment(Attachment):
    """An observer attached to one optimizer."""

    def __init__(self, observer: Observer, optimizer: Any) -> None:
        if not hasattr(optimizer, "diagnostics"):
            raise TypeError(f"the observer watches optimizers of stormplus, got {optimizer!r}")
        if "_move" in vars(optimizer):
            raise RuntimeError("an observer is attached to this optimizer already: close() it")
        self.observer, self.optimizer = observer, optimizer
        self._move: Callable[[], None] = optimizer._move
        self._estimate: Callable[[], None] = optimizer._estimate
        self._g: list[Tensor] | None = None
        self._half: tuple[list[Tensor], dict[str, float]] | None = None
        optimizer._move, optimizer._estimate = self._around_move, self._around_estimate

    def close(self) -> None:
        """Stop watching: the optimizer is as it was."""
        vars(self.optimizer).pop("_move", None)
        vars(self.optimizer).pop("_estimate", None)
        self._g = self._half = None

    @torch.no_grad()
    def _around_move(self) -> None:
        g_tilde, d = self._gradients(), self._estimators()
        pair = {"innovation_sq": _square(d, g_tilde)}
        if self._g is not None:
            pair["two_sample_sq"] = _square(self._g, g_tilde)
        self._g = None
        before = [p.detach().clone() for p in self._parameters()]
        self._move()
        pair["move_sq"] = _square([p.detach() for p in self._parameters()], before)
        self._half = (g_tilde, pair)

    @torch.no_grad()
    def _around_estimate(self) -> None:
        g = self._gradients()
        if not self.optimizer.started:  # a restart: the move before it had another sample
            self._half = None
        self._estimate()
        half, self._half, self._g = self._half, None, g
        seen = self.optimizer.diagnostics()
        row = {
            name: float(seen[name])
            for name in ("gain", "step_size", "grad_norm", "estimator_norm")
            if name in seen
        }
        step = int(seen["step"])
        if self.observer.full_grad is not None and self.observer.due(step):
            with torch.enable_grad():
                g_bar = [t.detach() for t in self.observer.full_grad()]
            row["true_error_sq"] = _square(self._estimators(), g_bar)
            row["true_noise_sq"] = _square(g, g_bar)
        pair = None
        if half is not None and "two_sample_sq" in half[1]:
            pair = half[1] | {"drift_sq": _square(g, half[0])}
        self.observer.record(step, row, pair)

    def _parameters(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _gradients(self) -> list[Tensor]:
        """Copies of the gradients as the optimizer sees them.

        L2 decay and the sign are in; a missing gradient is zero.
        """
        found: list[Tensor] = []
        for group in self.optimizer.param_groups:
            sign = -1.0 if group["maximize"] else 1.0
            decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
            for p in group["params"]:
                if p.requires_grad:
                    g = torch.zeros_like(p) if p.grad is None else sign * p.grad.detach()
                    found.append(g + decay * p.detach())
        return found

    def _estimators(self) -> list[Tensor]:
        states = [(p, self.optimizer.state[p]) for p in self._parameters()]
        return [s["estimator"] if s["joined"] else torch.zeros_like(p) for p, s in states]


def _square(left: list[Tensor], right: list[Tensor]) -> float:
    """|left - right|^2, summed in float64 over all tensors; one wait for the device."""
    norms = [torch.linalg.vector_norm(a - b, dtype=torch.float64) for a, b in zip(left, right)]
    return float(torch.stack(norms).square().sum())
