from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.training import Training
from benchmark_utils.variance_reduction import Mars


class Solver(TorchSolver):
    """MARS-AdamW with the exact correction (Yuan et al. 2024)."""

    name = "mars"
    label = "MARS"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 3e-3

    def stepper(self, training: Training, lr: float) -> Any:
        return Mars(training.model, lr)
