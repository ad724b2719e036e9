from stormplus import Untuned
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import AtAverage, Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


class Solver(TorchSolver):
    """Untuned, beyond the paper: one gradient per step, no learning rate."""

    name, label = "untuned", "Untuned"
    default_lr = 1.0  # its parameter groups' factor, for schedulers

    def applies(self, workload: Workload) -> tuple[bool, str | None]:
        if self.lr not in (None, self.default_lr):
            return True, f"Untuned has no learning rate, got {self.lr}"
        return False, None

    def stepper(self, training: Training, lr: float) -> Stepper:
        return AtAverage(Untuned(training.parameters))
