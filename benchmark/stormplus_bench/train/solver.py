"""The base of every solver: train to each checkpoint, measure, stop at the budget."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from benchopt import BaseSolver

from stormplus_bench import rows
from stormplus_bench.train.steppers import Stepper, TwoGradients
from stormplus_bench.train.training import Training, part_file
from stormplus_bench.train.workload import Workload


class TorchSolver(BaseSolver):
    """A solver says its `label`, its documented `default_lr`, and its `stepper`.

    `lr=None` is the documented default; `default` in the results says when that was run.
    """

    sampling_strategy = "callback"
    parameters: ClassVar[dict[str, list[Any]]] = {"lr": [None]}
    requirements = ["pip::stormplus-bench"]
    label: str
    default_lr: float
    price = 1  # gradients of a step, for projections

    @property
    def method(self) -> str:
        return self.label

    @abstractmethod
    def stepper(self, training: Training, lr: float) -> Stepper:
        """How this method takes a step, at the given learning rate."""

    def applies(self, workload: Workload) -> tuple[bool, str | None]:
        """Whether to skip the workload, and why."""
        return False, None

    def skip(self, workload: Workload, seed: int) -> tuple[bool, str | None]:
        journal = os.environ.get("STORMPLUS_ROWS")
        lr = self.default_lr if self.lr is None else self.lr
        if journal and (workload.name, self.method, lr, seed) in _done(journal):
            return True, "already in the journal"
        return self.applies(workload)

    def set_objective(self, workload: Workload, seed: int) -> None:
        self.workload, self.seed = workload, seed
        self.run_info: dict[str, Any] = {
            "method": self.method,
            "lr": self.default_lr if self.lr is None else self.lr,
            "default": self.lr is None or self.lr == self.default_lr,
        }

    def run(self, callback: Callable[[], bool]) -> None:
        # One thread by default: two runs side by side, and the same sums on every machine.
        torch.set_num_threads(int(os.environ.get("STORMPLUS_THREADS", "1")))
        lr = self.run_info["lr"]
        self.training = Training(self.workload, lambda t: self.stepper(t, lr), self.seed)
        journal = os.environ.get("STORMPLUS_ROWS") if self.workload.resumes else None
        part = journal and part_file(journal, (self.workload.name, self.method, lr, self.seed))
        if part and part.exists():
            self.training.restore(part)
        for target in self.workload.checkpoints[len(self.training.curve["samples"]) :]:
            self.training.advance(target)
            if not callback() or self.training.status == "diverged":
                return
            if part and target < self.workload.budget:
                self.training.save(part)

    def get_next(self, stop_val: int) -> int:
        return stop_val + 1  # every checkpoint is measured

    def get_result(self) -> dict[str, Any]:
        return {"training": self.training, "run": self.run_info}


class StormSolver(TorchSolver):
    """One of this library's optimizers, `optimizer`, with either norm."""

    parameters: ClassVar[dict[str, list[Any]]] = {"lr": [None], "norm": ["raw", "mean"]}
    default_lr = 1.0
    price = 2
    optimizer: Callable[..., torch.optim.Optimizer]

    @property
    def method(self) -> str:
        return self.label if self.norm == "raw" else f"{self.label} {self.norm}"

    def stepper(self, training: Training, lr: float) -> Stepper:
        optimizer = type(self).optimizer(training.model.parameters(), lr, norm=self.norm)
        return TwoGradients(optimizer)


_seen: dict[str, tuple[float, set[Any]]] = {}


def _done(journal: str) -> set[Any]:
    """The journal's keys, read again when it has grown."""
    if not os.path.exists(journal):
        return set()
    size = os.path.getsize(journal)
    if journal not in _seen or _seen[journal][0] != size:
        _seen[journal] = (size, rows.keys(journal))
    return _seen[journal][1]
