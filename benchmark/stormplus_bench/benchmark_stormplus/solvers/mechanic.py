from mechanic_pytorch import mechanize
from torch.optim import AdamW

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """Mechanic (Cutkosky et al. 2023) around AdamW; lr 1 as documented."""

    name = "mechanic"
    label = "Mechanic"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(mechanize(AdamW)(training.parameters, lr=lr))
