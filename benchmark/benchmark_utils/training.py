"""One run: a workload, an optimizer, and counts of what was spent."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stormplus.bench.run import CURVE


class Diverged(ArithmeticError):
    """A loss, gradient or parameter is not finite. However large, a finite one may come back."""


class Training:
    """Trains until a number of gradient evaluations, counts them, and records a curve.

    Args:
        workload: What to train.
        stepper: Makes the object with `step(training)`, from the model.
        seed: Of the model and of the samples.
    """

    def __init__(self, workload: Any, stepper: Callable[[Training], Any], seed: int) -> None:
        self.workload, self.seed = workload, seed
        self.model: nn.Module = workload.model(seed).to(workload.device)
        self.model.train()
        self._stream = workload.samples(seed)
        self.evaluations = self.samples = 0
        self.seconds = self.peak_memory_mb = 0.0
        self.status = "done"
        self.curve: dict[str, list[float]] = {name: [] for name in CURVE}
        self.stepper = stepper(self)

    def draw(self) -> Any:
        self.samples += 1
        return next(self._stream)

    def gradient(self, batch: Any) -> Tensor:
        """Evaluate the loss and its gradient: what every method's budget counts."""
        return self.gradient_of(self.model, batch)

    def gradient_of(self, model: nn.Module, batch: Any) -> Tensor:
        model.zero_grad()
        loss: Tensor = self.workload.loss(model, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged(f"loss {value}")
        loss.backward()
        self.evaluations += 1
        return loss.detach()

    def advance(self, target: int) -> None:
        """Train until `target` gradient evaluations are spent, or the run diverges."""
        reset_peak_memory()
        start = time.perf_counter()
        try:
            # A step that would overspend is not taken.
            while self.evaluations + self.stepper.price <= target:
                self.stepper.step(self)
            if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
                raise Diverged("parameters")
        except (Diverged, FloatingPointError):
            self.status = "diverged"
        self.seconds += time.perf_counter() - start
        self.peak_memory_mb = max(self.peak_memory_mb, peak_memory_mb())

    def require_whole(self) -> None:
        """Raise if the run was stopped from outside: it must not pass for a result."""
        budget = self.workload.budget
        if self.status == "done" and self.evaluations + self.stepper.price <= budget:
            raise RuntimeError(
                f"stopped at {self.evaluations} of {budget} gradient evaluations: give benchopt "
                "--no-timeout, or use `stormplus compare`, which does"
            )

    def record(self) -> dict[str, float]:
        """Measure the point that the method would give its user, and add it to the curve."""
        point = dict.fromkeys(CURVE, math.nan)
        if self.status == "done":
            model = self.stepper.result(self)
            point |= self.workload.measure(model)
            point["grad_norm"] = self.workload.full_grad_norm(model)
            self.stepper.resume(self)
            if not math.isfinite(point["train_loss"]):
                self.status = "diverged"
        if self.status == "diverged":
            point["train_loss"] = math.inf
        point |= {"evaluations": self.evaluations, "samples": self.samples}
        point["seconds"] = self.seconds
        for name in CURVE:
            self.curve[name].append(float(point[name]))
        return point


def peak_memory_mb() -> float:
    """The most memory in use since `reset_peak_memory`, in MB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(row.split()[1]) / 1024 for row in lines if row.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # since the process began


def reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # Linux: "5" sets the mark back to what is in use now
        Path("/proc/self/clear_refs").write_text("5")
