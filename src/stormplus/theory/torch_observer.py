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

Vectors = dict[Tensor, Tensor]  # by parameter


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
        self._g: Vectors = {}
        self._half: tuple[Vectors, dict[str, float]] | None = None
        optimizer._move, optimizer._estimate = self._around_move, self._around_estimate

    def close(self) -> None:
        """Stop watching: the optimizer is as it was."""
        vars(self.optimizer).pop("_move", None)
        vars(self.optimizer).pop("_estimate", None)
        self._g, self._half = {}, None

    @torch.no_grad()
    def _around_move(self) -> None:
        g_tilde, d = self._gradients(), self._estimators()
        before = {p: p.detach().clone() for p in d}
        pair = {"innovation_sq": _square(d, g_tilde), "two_sample_sq": _square(self._g, g_tilde)}
        known, self._g = bool(self._g), {}
        self._move()
        pair["move_sq"] = _square({p: p.detach() for p in before}, before)
        self._half = (g_tilde, pair) if known else None

    @torch.no_grad()
    def _around_estimate(self) -> None:
        g = self._gradients()
        if not self.optimizer.started:  # a restart: the move before it had another sample
            self._half = None
        self._estimate()
        half, self._half, self._g = self._half, None, g
        seen = self.optimizer.diagnostics()
        names = ("gain", "step_size", "grad_norm", "estimator_norm")
        row = {name: float(seen[name]) for name in names}
        step = int(seen["step"])
        if self.observer.full_grad is not None and self.observer.due(step):
            with torch.enable_grad():
                g_bar = self._gradients(list(self.observer.full_grad()))
            row["true_error_sq"] = _square(self._estimators(), g_bar)
            row["true_noise_sq"] = _square(g, g_bar)
        pair = None if half is None else half[1] | {"drift_sq": _square(g, half[0])}
        self.observer.record(step, row, pair)

    def _gradients(self, given: list[Tensor | None] | None = None) -> Vectors:
        """Gradients as the optimizer sees them: L2 decay and the sign are in.

        Those of `.grad`, or those given, one a parameter. A parameter without one, or
        frozen, is left out, and so takes no part in a comparison.
        """
        found: Vectors = {}
        params = [(group, p) for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for _, p in params] if given is None else given
        for (group, p), g in zip(params, gradients, strict=True):
            if p.requires_grad and g is not None:
                sign = -1.0 if group["maximize"] else 1.0
                decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
                found[p] = sign * g.detach() + decay * p.detach()
        return found

    def _estimators(self) -> Vectors:
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        states = [(p, self.optimizer.state[p]) for p in params]
        return {p: s["estimator"] for p, s in states if s["joined"] == 1 and p.requires_grad}


def _square(left: Vectors, right: Vectors) -> float:
    """|left - right|^2 over the parameters that both have, in float64; waits once."""
    both = [p for p in left if p in right]
    norms = [torch.linalg.vector_norm(left[p] - right[p], dtype=torch.float64) for p in both]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
