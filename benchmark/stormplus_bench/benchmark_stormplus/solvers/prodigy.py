from prodigyopt import Prodigy

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """Prodigy (Mishchenko and Defazio 2024); its documentation says to leave lr at 1."""

    name = "prodigy"
    label = "Prodigy"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(Prodigy(training.model.parameters(), lr=lr))
