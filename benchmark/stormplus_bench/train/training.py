"""One run: a workload, an optimizer, counts of what was spent, and the row it leaves."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import resource
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stormplus import StormPlus
from stormplus.files import named, write_whole
from stormplus_bench.rows import CURVE, Key
from stormplus_bench.train.estimator import QUANTITIES, quantities
from stormplus_bench.train.workload import Network, Workload

if TYPE_CHECKING:
    from stormplus_bench.train.steppers import Stepper

PACKAGES = (
    "stormplus",
    "torch",
    "numpy",
    "benchopt",
    "schedulefree",
    "prodigyopt",
    "dog-optimizer",
    "dadaptation",
    "mechanic-pytorch",
)


class Diverged(ArithmeticError):
    """A loss, gradient or parameter is not finite. However large, a finite one may come back."""


class Training:
    """Trains until a number of gradient evaluations, counts them, and records a curve.

    Args:
        workload: What to train.
        stepper: Makes the method, from the run with its model.
        seed: Of the model, of the samples, and of what the model draws (dropout on the CPU).
    """

    def __init__(
        self, workload: Workload, stepper: Callable[[Training], Stepper], seed: int
    ) -> None:
        self.workload, self.seed = workload, seed
        self.model: nn.Module = workload.model(seed).to(workload.device)
        self.model.train()
        self._stream = workload.samples(seed)
        self._random = torch.Generator().manual_seed(2000 + seed).get_state()
        self.evaluations = self.samples = 0
        self.seconds = self.peak_memory_mb = 0.0
        self.status = "done"
        self.curve: dict[str, list[float]] = {name: [] for name in CURVE}
        self.stepper = stepper(self)
        optimizer = getattr(self.stepper, "optimizer", None)
        self.watched = optimizer if workload.watches and isinstance(optimizer, StormPlus) else None
        self.estimator: dict[str, list[float]] = {name: [] for name in QUANTITIES}

    @property
    def spent(self) -> int:
        """Of the budget."""
        return self.samples if self.workload.counts == "samples" else self.evaluations

    @property
    def price(self) -> int:
        """What a step may spend of the budget."""
        return 1 if self.workload.counts == "samples" else self.stepper.price

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained: not every optimizer takes parameters that have no gradient."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def draw(self) -> Any:
        self.samples += 1
        return next(self._stream)

    def gradient(self, sample: Any) -> Tensor:
        """Evaluate the loss and its gradient: what every method's budget counts."""
        return self.gradient_of(self.model, sample)

    def gradient_of(self, model: nn.Module, sample: Any) -> Tensor:
        model.zero_grad()
        loss: Tensor = self.workload.loss(model, sample)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged(f"loss {value}")
        loss.backward()
        self.evaluations += 1
        return loss.detach()

    def advance(self, target: int) -> None:
        """Train until `target` of the budget is spent, or the run diverges."""
        reset_peak_memory()
        start = time.perf_counter()
        try:
            # A model that draws numbers draws the same ones whoever trained before in the process.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._random.cpu())
                try:
                    # A step that would overspend is not taken.
                    while self.spent + self.price <= target:
                        self.stepper.step(self)
                finally:
                    self._random = torch.get_rng_state()
            if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
                raise Diverged("parameters")
        except (Diverged, FloatingPointError):
            self.status = "diverged"
        self.seconds += time.perf_counter() - start
        self.peak_memory_mb = max(self.peak_memory_mb, peak_memory_mb())

    def require_whole(self) -> None:
        """Raise if the run was stopped from outside: it must not pass for a result."""
        budget = self.workload.budget
        if self.status == "done" and self.spent + self.price <= budget:
            raise RuntimeError(
                f"stopped at {self.spent} of {budget} {self.workload.counts}: give benchopt "
                "--no-timeout, or use `stormplus compare`, which does"
            )

    def record(self) -> dict[str, float]:
        """Measure the model that the method would give its user, and add it to the curve."""
        values = dict.fromkeys(CURVE, math.nan)
        if self.status == "done":
            model = self.stepper.result(self)
            values |= self.workload.measure(model)
            values["grad_norm"] = self.workload.full_grad_norm(model)
            self.stepper.resume()
            if self.watched is not None:
                assert isinstance(self.workload, Network)
                seen = quantities(self.watched, self.model, self.workload)
                for name, value in seen.items():
                    self.estimator[name].append(value)
            if not math.isfinite(values["train_loss"]):
                self.status = "diverged"
        if self.status == "diverged":
            values["train_loss"] = math.inf
        values |= {"evaluations": self.evaluations, "samples": self.samples}
        values["seconds"] = self.seconds
        for name in CURVE:
            self.curve[name].append(float(values[name]))
        return values

    def save(self, file: Path) -> None:
        """Keep all that the run needs to go on from here, and the share that is done beside it."""
        state = self.stepper.state_dict()
        if state is None:
            return
        held = {name: getattr(self, name) for name in _KEPT}
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_suffix(".half")
        with named(file):
            torch.save({"model": self.model.state_dict(), "stepper": state, **held}, half)
            os.replace(half, file)  # an interruption leaves the one before
        write_whole(share_file(file), f"{self.spent / self.workload.budget:.4f}")

    def restore(self, file: Path) -> None:
        """Go on from what `save` has kept: the same numbers as without the interruption."""
        held = torch.load(file, map_location=self.workload.device, weights_only=True)
        self.model.load_state_dict(held.pop("model"))
        self.stepper.load_state_dict(held.pop("stepper"))
        for name, value in held.items():
            setattr(self, name, value)
        for _ in range(self.samples):  # the stream depends on the seed alone
            next(self._stream)


_KEPT = (
    *("evaluations", "samples", "seconds", "peak_memory_mb", "status", "curve", "estimator"),
    "_random",  # of the streams, the one that cannot be played again
)


def part_file(journal: str | os.PathLike[str], key: Key) -> Path:
    """Where an unfinished run keeps its state, beside the journal."""
    name = "-".join(map(str, key)).replace("+", "plus")
    return Path(journal).with_suffix(".parts") / (re.sub(r"[^\w.]+", "-", name) + ".pt")


def share_file(part: Path) -> Path:
    """Where an unfinished run says which share of its budget is spent."""
    return part.with_suffix(".share")


def forget(part: Path) -> None:
    """Remove what an unfinished run has kept: it has ended."""
    part.unlink(missing_ok=True)
    share_file(part).unlink(missing_ok=True)


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


def row_of(training: Training, run: dict[str, Any]) -> dict[str, Any]:
    """The record of a finished run for the journal; `run` says its method and rate."""
    workload = training.workload
    files = run.get("files", {}) | ({"workload": workload.version} if workload.version else {})
    row = {
        "workload": workload.name,
        **run,
        **({"files": files} if files else {}),
        "seed": training.seed,
        "status": training.status,
        "budget": workload.budget,
        "batch_size": workload.batch_size,
        "measured": workload.measured,
        "peak_memory_mb": round(training.peak_memory_mb, 1),
        "state_mb": round(training.stepper.state_mb, 4),
        "curve": _shortened(training.curve),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": machine(workload.device),
    }
    if training.watched is not None:
        row["estimator"] = _shortened(training.estimator)
    return row


def _shortened(curves: dict[str, list[float]]) -> dict[str, list[float | int | None]]:
    return {name: [_short(value) for value in values] for name, values in curves.items()}


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine(device: str = "cpu") -> str:
    """Processor, accelerator if it is used, and operating system; no name of the host."""
    info = Path("/proc/cpuinfo")
    processor = platform.processor() or platform.machine()
    if info.exists():
        models = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        processor = models[0].split(":", 1)[1].strip() if models else processor
    if device == "cuda":
        processor += f", {torch.cuda.get_device_name()}"
    return f"{processor}, {platform.system()}, Python {platform.python_version()}"
