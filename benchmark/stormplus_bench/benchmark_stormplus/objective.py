"""The objective: train a workload within a budget of gradient evaluations.

Only the budget stops a run: benchopt's default criterion would cut noisy runs short. A run that
diverges is a result, not an error.
"""

import os
from typing import Any

from benchopt import BaseObjective
from benchopt.stopping_criterion import NoCriterion
from torch.optim import SGD

from stormplus_bench import rows
from stormplus_bench.train.steppers import OneGradient
from stormplus_bench.train.training import Training, row_of

JOURNAL = "STORMPLUS_ROWS"


class Objective(BaseObjective):
    """Training loss of a network or of a smooth non-convex problem."""

    name = "Training loss"
    min_benchopt_version = "1.10"
    requirements = ["pip::stormplus-bench"]
    parameters = {"seed": [0]}
    sampling_strategy = "callback"
    stopping_criterion = NoCriterion(strategy="callback")
    test_config = {"dataset": {"name": "smooth"}}

    def set_data(self, workload: Any, reason: str | None) -> None:
        self.workload = workload

    def skip(self, workload: Any, reason: str | None) -> tuple[bool, str | None]:
        return workload is None, reason

    def get_objective(self) -> dict[str, Any]:
        return {"workload": self.workload, "seed": self.seed}

    def evaluate_result(self, training: Any, run: dict[str, Any]) -> dict[str, Any]:
        measured = training.record()
        row = row_of(training, run)
        about = {name: row[name] for name in row if name not in ("curve", "versions", "machine")}
        return {"value": measured.pop("train_loss"), **measured, **about}

    def save_final_results(self, training: Any, run: dict[str, Any]) -> None:
        """Append the run's row to the journal, if there is one."""
        training.require_whole()
        if os.environ.get(JOURNAL):
            rows.append(os.environ[JOURNAL], row_of(training, run))

    def get_one_result(self) -> dict[str, Any]:
        training = Training(
            self.workload, lambda t: OneGradient(SGD(t.model.parameters())), self.seed
        )
        return {"training": training, "run": {"method": "SGD", "lr": 1e-3, "default": True}}
