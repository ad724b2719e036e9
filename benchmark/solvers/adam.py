from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import OneGradient
from benchmark_utils.training import Training
from torch.optim import Adam


class Solver(TorchSolver):
    """torch.optim.Adam."""

    name = "adam"
    label = "Adam"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1e-3

    def stepper(self, training: Training, lr: float) -> Any:
        return OneGradient(Adam(training.model.parameters(), lr=lr))
