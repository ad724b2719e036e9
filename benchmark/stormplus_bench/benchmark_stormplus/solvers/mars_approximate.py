from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import MarsApproximate


class Solver(TorchSolver):
    """MARS-AdamW with one gradient per step, its authors' default (Yuan et al. 2024)."""

    name, label = "mars-approximate", "MARS approximate"
    default_lr = 3e-3
    test_config = {"dataset": {"name": "digits"}}

    def reason_to_skip(self, workload):
        has_matrix = any(p.ndim == 2 for p in workload.model(0).parameters())
        return None if has_matrix else "the model has no matrix"

    def stepper(self, training, lr):
        return MarsApproximate(training.parameters, lr)
