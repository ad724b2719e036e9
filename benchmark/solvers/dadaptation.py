from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import OneGradient
from benchmark_utils.training import Training
from dadaptation import DAdaptAdam


class Solver(TorchSolver):
    """D-Adaptation (Defazio and Mishchenko 2023), Adam variant; lr 1 as documented."""

    name = "dadaptation"
    label = "D-Adaptation"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Any:
        return OneGradient(DAdaptAdam(training.model.parameters(), lr=lr))
