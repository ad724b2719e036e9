from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import OneGradient
from benchmark_utils.training import Training
from prodigyopt import Prodigy


class Solver(TorchSolver):
    """Prodigy (Mishchenko and Defazio 2024); its documentation says to leave lr at 1."""

    name = "prodigy"
    label = "Prodigy"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Any:
        return OneGradient(Prodigy(training.model.parameters(), lr=lr))
