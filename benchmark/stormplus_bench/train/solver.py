"""Base classes of the benchopt solvers: train to each checkpoint and measure."""

import math
import os
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from benchopt import BaseSolver
from dog import PolynomialDecayAverager  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import rows
from stormplus_bench.methods import NO_RATE
from stormplus_bench.train.steppers import Averaged, OneGradient, Scheduled, Stepper, TwoGradients
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


class TorchSolver(BaseSolver):
    """A solver with a `label` for tables, a documented `default_lr` and a `stepper`.

    `lr=None` selects the default.
    """

    sampling_strategy = "callback"
    parameters: ClassVar[dict[str, list[Any]]] = {"lr": [None]}
    requirements = ["pip::stormplus-bench"]
    label: str
    default_lr: float

    @property
    def method(self) -> str:
        """The name in rows, tables and figures."""
        return self.label

    @property
    def rate(self) -> float:
        """The learning rate of this run."""
        return self.default_lr if self.lr is None else self.lr

    @abstractmethod
    def stepper(self, training: Training, lr: float) -> Stepper:
        """Return how this method takes a step at the given learning rate."""

    def reason_to_skip(self, workload: Workload) -> str | None:
        """Return why this run is left out; None if it is not."""
        if self.method in NO_RATE and self.rate != self.default_lr:
            return f"{self.method} has no learning rate, got {self.rate}"
        return self.unsuited(workload)

    @staticmethod
    def unsuited(workload: Workload) -> str | None:
        """Return why this method does not run on the workload; None if it does."""
        return None

    def skip(self, workload: Workload, seed: int) -> tuple[bool, str | None]:
        journal = os.environ.get("STORMPLUS_ROWS")
        if journal and (workload.name, self.method, self.rate, seed) in _keys(journal):
            return True, "already in the journal"
        reason = self.reason_to_skip(workload)
        return reason is not None, reason

    def set_objective(self, workload: Workload, seed: int) -> None:
        self.workload, self.seed = workload, seed
        is_default = self.rate == self.default_lr
        self.run_info = {"method": self.method, "lr": self.rate, "default": is_default}

    def run(self, callback: Callable[[], bool]) -> None:
        torch.set_num_threads(int(os.environ.get("STORMPLUS_THREADS", "1")))
        self.training = Training(self.workload, lambda t: self.stepper(t, self.rate), self.seed)
        for target in self.workload.checkpoints:
            self.training.advance(target)
            if not callback() or self.training.status == "diverged":
                return

    def get_next(self, stop_val: int) -> int:
        return stop_val + 1  # every checkpoint is measured

    def get_result(self) -> dict[str, Any]:
        return {"training": self.training, "run": self.run_info}


class OneGradientSolver(TorchSolver):
    """A torch optimizer with one gradient per step.

    Variants: "cosine" and "linear" schedules that end at zero, AdamW's after a warm-up; and
    "average", measured at DoG's average of the iterates, with weights like t^8.
    """

    parameters: ClassVar[dict[str, list[Any]]] = {"lr": [None], "variant": [None]}
    optimizer: Callable[..., Any]

    @property
    def method(self) -> str:
        return f"{self.label} {self.variant}" if self.variant else self.label

    def stepper(self, training: Training, lr: float) -> Stepper:
        optimizer = self.optimizer(training.parameters, lr=lr)
        if self.variant is None:
            return OneGradient(optimizer)
        if self.variant == "average":
            return Averaged(optimizer, PolynomialDecayAverager(training.model))
        warmup = 0.05 if self.label == "AdamW" else 0.0
        linear = self.variant == "linear"
        return Scheduled(optimizer, training.workload.budget, warmup, linear=linear)


class StormSolver(TorchSolver):
    """An optimizer with two gradients per step; `unit` as in the optimizer, or "mean".

    With "mean" the rule sees mean squares over the n coordinates instead of squared norms, as in
    the authors' code: the unit is sqrt(n), and lr is multiplied by it.
    """

    parameters: ClassVar[dict[str, list[Any]]] = {"lr": [None], "unit": [1.0]}
    optimizer: Callable[..., Any]

    @property
    def method(self) -> str:
        return self.label if self.unit == 1 else f"{self.label} {self.unit}"

    def stepper(self, training: Training, lr: float) -> Stepper:
        unit = self.unit
        if unit == "mean":
            unit = math.sqrt(sum(p.numel() for p in training.parameters))
            lr *= unit
        return TwoGradients(self.optimizer(training.parameters, lr, unit=unit))


def _keys(journal: str) -> set[rows.Key]:
    """Return the finished runs in the journal; read it again only if it has grown."""
    return _keys_at(journal, os.path.getsize(journal)) if os.path.exists(journal) else set()


@lru_cache(maxsize=1)
def _keys_at(journal: str, _size: int) -> set[rows.Key]:
    return rows.keys(journal)
