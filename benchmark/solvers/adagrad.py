from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import OneGradient
from benchmark_utils.training import Training
from torch.optim import Adagrad


class Solver(TorchSolver):
    """torch.optim.Adagrad."""

    name = "adagrad"
    label = "AdaGrad"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1e-2

    def stepper(self, training: Training, lr: float) -> Any:
        return OneGradient(Adagrad(training.model.parameters(), lr=lr))
