from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Mars, MarsApproximate


class Solver(TorchSolver):
    """MARS-AdamW (Yuan et al. 2024), exact or with one gradient per step, its authors' default."""

    name, label = "mars", "MARS"
    parameters = {"lr": [None], "approximate": [False]}
    default_lr = 3e-3

    @property
    def method(self):
        return f"{self.label} approximate" if self.approximate else self.label

    def reason_to_skip(self, workload):
        if self.approximate and all(p.ndim != 2 for p in workload.model(0).parameters()):
            return "the model has no matrix"
        return None

    def stepper(self, training, lr):
        return (MarsApproximate if self.approximate else Mars)(training.model, lr)
