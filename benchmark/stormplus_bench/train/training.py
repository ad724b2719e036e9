"""One run: a workload, a stepper, counts of what was spent, and the resulting row."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from benchopt.utils.sys_info import get_sys_info
from torch import Tensor, nn

from stormplus_bench.rows import CURVE
from stormplus_bench.train.workload import Workload

if TYPE_CHECKING:
    from stormplus_bench.train.steppers import Stepper

PACKAGES = (  # whose versions are in a row
    *("stormplus", "torch", "numpy", "benchopt", "schedulefree", "prodigyopt", "dog-optimizer"),
    *("dadaptation", "mechanic-pytorch"),
)


class Diverged(ArithmeticError):
    """A loss, gradient or parameter is not finite."""


class Training:
    """Trains up to a number of gradient evaluations, counts them, and records a curve.

    Args:
        workload: What to train.
        stepper: Makes the method's stepper from this object, which has the model.
        seed: For the model, the samples, and the model's random numbers (dropout on the CPU).
    """

    def __init__(
        self, workload: Workload, stepper: Callable[[Training], Stepper], seed: int
    ) -> None:
        self.workload, self.seed = workload, seed
        self.model: nn.Module = workload.model(seed).to(workload.device)
        self.model.train()
        self._stream = workload.samples(seed)
        self._rng_state = torch.Generator().manual_seed(2000 + seed).get_state()
        self.evaluations = self.samples = 0
        self.seconds = 0.0
        self.status = "done"
        self.curve: dict[str, list[float]] = {name: [] for name in CURVE}
        self.stepper = stepper(self)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters: not every optimizer accepts frozen ones."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def draw(self) -> Any:
        """Return the next sample."""
        self.samples += 1
        return next(self._stream)

    def gradient(self, sample: Any, model: nn.Module | None = None) -> Tensor:
        """Evaluate the loss and its gradient at the model, or at another one, and count it."""
        model = self.model if model is None else model
        model.zero_grad()
        loss: Tensor = self.workload.loss(model, sample)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged(f"loss {value}")
        loss.backward()
        self.evaluations += 1
        return loss.detach()

    def advance(self, target: int) -> None:
        """Train until another step would exceed `target` evaluations, or the run diverges."""
        start = time.perf_counter()
        try:
            # The model's random numbers do not depend on earlier runs in this process.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._rng_state)
                try:
                    while self.evaluations + self.stepper.gradients_per_step <= target:
                        self.stepper.step(self)
                finally:
                    self._rng_state = torch.get_rng_state()
            if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
                raise Diverged("parameters")
        except ArithmeticError:
            self.status = "diverged"
        self.seconds += time.perf_counter() - start

    def finish(self, notify: Callable[[int], object] = lambda evaluations: None) -> Training:
        """Train to the end of the budget, or until the run diverges, and measure on the way."""
        for target in self.workload.checkpoints:
            self.advance(target)
            self.record()
            notify(target)
            if self.status == "diverged":
                break
        return self

    def require_whole(self) -> None:
        """Raise if benchopt stopped the run before its budget was spent."""
        budget = self.workload.budget
        if self.status == "done" and self.evaluations + self.stepper.gradients_per_step <= budget:
            raise RuntimeError(
                f"stopped at {self.evaluations} of {budget} evaluations: give benchopt "
                "--no-timeout, or use `stormplus compare`, which does"
            )

    def record(self) -> dict[str, float]:
        """Measure the model that the method would return to its user; add it to the curve."""
        values = dict.fromkeys(CURVE, math.nan)
        if self.status == "done":
            model = self.stepper.result(self)
            values |= self.workload.measure(model)
            values["grad_norm"] = self.workload.full_grad_norm(model)
            self.stepper.resume()
            if not math.isfinite(values["train_loss"]):
                self.status = "diverged"
        if self.status == "diverged":
            values["train_loss"] = math.inf
        values |= {"evaluations": self.evaluations, "samples": self.samples}
        values["seconds"] = self.seconds
        for name in CURVE:
            self.curve[name].append(float(values[name]))
        return values


def row_of(training: Training, run: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a finished run; `run` has its method, its rate and "default"."""
    workload = training.workload
    return {
        "workload": workload.name,
        **run,
        "seed": training.seed,
        "status": training.status,
        "budget": workload.budget,
        "batch_size": workload.batch_size,
        "measured": workload.measured,
        "state_mb": round(training.stepper.state_mb, 4),
        "curve": {name: list(map(_short, values)) for name, values in training.curve.items()},
        "versions": {name: version(name) for name in PACKAGES},
        "machine": machine(workload.device),
    }


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


@cache
def machine(device: str = "cpu") -> str:
    """Return processor, GPU if it is used, and operating system, without the host's name."""
    parts = [get_sys_info()["system-processor"] or platform.machine()]
    parts += [torch.cuda.get_device_name()] if device == "cuda" else []
    return ", ".join([*parts, platform.system(), f"Python {platform.python_version()}"])
