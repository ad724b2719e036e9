from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Mars


class Solver(TorchSolver):
    """MARS-AdamW with the exact correction (Yuan et al. 2024)."""

    name, label = "mars", "MARS"
    default_lr = 3e-3

    def stepper(self, training, lr):
        return Mars(training.model, lr)
