from schedulefree import AdamWScheduleFree

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import ScheduleFree, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """Schedule-Free AdamW (Defazio et al. 2024)."""

    name = "schedule-free"
    label = "Schedule-Free"
    requirements = ["pip::stormplus-bench"]
    default_lr = 0.0025

    def stepper(self, training: Training, lr: float) -> Stepper:
        return ScheduleFree(AdamWScheduleFree(training.model.parameters(), lr=lr))
