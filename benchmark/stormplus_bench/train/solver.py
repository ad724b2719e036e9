"""The benchopt solver of a method: trains to each checkpoint, where benchopt measures."""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from benchopt import BaseSolver

from stormplus_bench import rows
from stormplus_bench.methods import NO_RATE
from stormplus_bench.train.steppers import Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


def suits_all(workload: Workload) -> str | None:
    return None


class TorchSolver(BaseSolver):
    """A method; `lr=None` selects the default.

    Attributes:
        label: The name in tables; a chosen option is added to it ("AdamW cosine").
        default_lr: The documented learning rate.
        options: Other parameters of the stepper, with their defaults.
        unsuited: Returns why the method does not run on a workload; None if it does.
    """

    sampling_strategy = "callback"
    parameters: ClassVar[dict[str, list[Any]]] = {"lr": [None]}
    requirements = ["pip::stormplus-bench"]
    label: str
    default_lr: float
    options: ClassVar[dict[str, Any]] = {}
    make_stepper: Callable[..., Stepper]
    unsuited: Callable[[Workload], str | None] = staticmethod(suits_all)

    @property
    def method(self) -> str:
        """The name in rows, tables and figures."""
        chosen = [(getattr(self, name), default) for name, default in self.options.items()]
        return " ".join(
            [self.label, *(str(value) for value, default in chosen if value != default)]
        )

    @property
    def rate(self) -> float:
        """The learning rate of this run."""
        return self.default_lr if self.lr is None else self.lr

    def stepper(self, training: Training, lr: float) -> Stepper:
        """Return how this method takes a step at the given learning rate."""
        options = {name: getattr(self, name) for name in self.options}
        return self.make_stepper(training, lr, **options)

    def reason_to_skip(self, workload: Workload) -> str | None:
        """Return why this run is left out; None if it is not."""
        if self.method in NO_RATE and self.rate != self.default_lr:
            return f"{self.method} has no learning rate, got {self.rate}"
        return self.unsuited(workload)

    def skip(self, workload: Workload, seed: int) -> tuple[bool, str | None]:
        journal = os.environ.get("STORMPLUS_ROWS")
        if journal and (workload.name, self.method, self.rate, seed) in _keys(journal):
            return True, "already in the journal"
        reason = self.reason_to_skip(workload)
        return reason is not None, reason

    def set_objective(self, workload: Workload, seed: int) -> None:
        self.workload, self.seed = workload, seed

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
        is_default = self.rate == self.default_lr
        run = {"method": self.method, "lr": self.rate, "default": is_default}
        return {"training": self.training, "run": run}


def solver(
    name: str,
    label: str,
    default_lr: float,
    stepper: Callable[..., Stepper],
    unsuited: Callable[[Workload], str | None] = suits_all,
    **options: Any,
) -> type[TorchSolver]:
    """Return the solver that suites know by this name; `options` as in `TorchSolver`."""
    about = {
        "name": name,
        "label": label,
        "default_lr": default_lr,
        "parameters": {"lr": [None], **{option: [value] for option, value in options.items()}},
        "options": options,
        "make_stepper": staticmethod(stepper),
        "unsuited": staticmethod(unsuited),
        "test_config": {"dataset": {"name": "digits"}},  # has matrices
    }
    return type("Solver", (TorchSolver,), about)


def _keys(journal: str) -> set[rows.Key]:
    """Return the finished runs in the journal; read it again only if it has grown."""
    return _keys_at(journal, os.path.getsize(journal)) if os.path.exists(journal) else set()


@lru_cache(maxsize=1)
def _keys_at(journal: str, _size: int) -> set[rows.Key]:
    return rows.keys(journal)
