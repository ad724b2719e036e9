from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Mars, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """MARS-AdamW with the exact correction (Yuan et al. 2024)."""

    name, label = "mars", "MARS"
    default_lr = 3e-3

    def stepper(self, training: Training, lr: float) -> Stepper:
        return Mars(training.model, lr)
