from stormplus import Untuned
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import AtAverage


class Solver(TorchSolver):
    """Untuned, beyond the paper: one gradient per step, no learning rate."""

    name, label = "untuned", "Untuned"
    default_lr = 1.0  # its parameter groups' factor, for schedulers

    def reason_to_skip(self, workload):
        if self.lr not in (None, self.default_lr):
            return f"Untuned has no learning rate, got {self.lr}"
        return None

    def stepper(self, training, lr):
        return AtAverage(Untuned(training.parameters))
