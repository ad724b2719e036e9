from dadaptation import DAdaptAdam

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """D-Adaptation (Defazio and Mishchenko 2023), Adam variant; lr 1 as documented."""

    name = "dadaptation"
    label = "D-Adaptation"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(DAdaptAdam(training.model.parameters(), lr=lr))
