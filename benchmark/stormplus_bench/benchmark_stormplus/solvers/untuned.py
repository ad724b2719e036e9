from stormplus import Untuned
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import AtAverage, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """Untuned, beyond the paper: one gradient a step; lr 1 as documented."""

    name = "untuned"
    label = "Untuned"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Stepper:
        return AtAverage(Untuned(training.model.parameters(), lr))
