from torch.optim import AdamW

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """torch.optim.AdamW, weight decay 0.01 as by default."""

    name = "adamw"
    label = "AdamW"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1e-3

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(AdamW(training.parameters, lr=lr))
