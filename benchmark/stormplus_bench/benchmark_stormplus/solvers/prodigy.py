from prodigyopt import Prodigy

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Scheduled, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """Prodigy (Mishchenko and Defazio 2024); its documentation says to leave lr at 1.

    With `cosine` its rate falls to zero, as its documentation suggests.
    """

    name = "prodigy"
    label = "Prodigy"
    requirements = ["pip::stormplus-bench"]
    parameters = {"lr": [None], "cosine": [False]}
    default_lr = 1.0

    @property
    def method(self) -> str:
        return f"{self.label} cosine" if self.cosine else self.label

    def stepper(self, training: Training, lr: float) -> Stepper:
        optimizer = Prodigy(training.parameters, lr=lr)
        if self.cosine:
            return Scheduled(optimizer, training.workload.budget, warmup=0.0)
        return OneGradient(optimizer)
