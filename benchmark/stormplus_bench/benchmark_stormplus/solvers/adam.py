from torch.optim import Adam

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """torch.optim.Adam."""

    name = "adam"
    label = "Adam"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1e-3

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(Adam(training.model.parameters(), lr=lr))
