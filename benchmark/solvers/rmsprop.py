from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import OneGradient
from benchmark_utils.training import Training
from torch.optim import RMSprop


class Solver(TorchSolver):
    """torch.optim.RMSprop."""

    name = "rmsprop"
    label = "RMSprop"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1e-2

    def stepper(self, training: Training, lr: float) -> Any:
        return OneGradient(RMSprop(training.model.parameters(), lr=lr))
