from stormplus_bench.train.adampp import AdamPlusPlus
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Scheduled, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """Adam++ (Tao et al. 2024), written from its paper; lr 1, with `cosine` falling to zero."""

    name = "adam-plus-plus"
    label = "Adam++"
    requirements = ["pip::stormplus-bench"]
    parameters = {"lr": [None], "cosine": [False]}
    default_lr = 1.0

    @property
    def method(self) -> str:
        return f"{self.label} cosine" if self.cosine else self.label

    def stepper(self, training: Training, lr: float) -> Stepper:
        optimizer = AdamPlusPlus(training.parameters, lr=lr)
        if self.cosine:
            return Scheduled(optimizer, training.workload.budget, warmup=0.0)
        return OneGradient(optimizer)
