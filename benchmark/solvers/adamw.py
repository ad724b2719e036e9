from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import OneGradient
from benchmark_utils.training import Training
from torch.optim import AdamW


class Solver(TorchSolver):
    """torch.optim.AdamW, weight decay 0.01 as by default."""

    name = "adamw"
    label = "AdamW"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1e-3

    def stepper(self, training: Training, lr: float) -> Any:
        return OneGradient(AdamW(training.model.parameters(), lr=lr))
