from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import OneGradient
from benchmark_utils.training import Training
from mechanic_pytorch import mechanize
from torch.optim import AdamW


class Solver(TorchSolver):
    """Mechanic (Cutkosky et al. 2023) around AdamW; lr 1 as documented."""

    name = "mechanic"
    label = "Mechanic"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Any:
        return OneGradient(mechanize(AdamW)(training.model.parameters(), lr=lr))
