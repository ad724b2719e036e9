from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import ScheduleFree
from benchmark_utils.training import Training
from schedulefree import AdamWScheduleFree


class Solver(TorchSolver):
    """Schedule-Free AdamW (Defazio et al. 2024)."""

    name = "schedule-free"
    label = "Schedule-Free"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 0.0025

    def stepper(self, training: Training, lr: float) -> Any:
        return ScheduleFree(AdamWScheduleFree(training.model.parameters(), lr=lr))
