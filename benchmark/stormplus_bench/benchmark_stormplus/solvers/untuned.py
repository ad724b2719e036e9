from stormplus import Untuned
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import AtAverage, Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


class Solver(TorchSolver):
    """Untuned, beyond the paper: one gradient a step, and no learning rate."""

    name = "untuned"
    label = "Untuned"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1.0  # what its groups have, for schedulers

    def applies(self, workload: Workload) -> tuple[bool, str | None]:
        if self.lr not in (None, self.default_lr):
            return True, f"there is no learning rate to set, got {self.lr}"
        return False, None

    def stepper(self, training: Training, lr: float) -> Stepper:
        return AtAverage(Untuned(training.parameters))
