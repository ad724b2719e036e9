from torch.optim import RMSprop

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """torch.optim.RMSprop."""

    name = "rmsprop"
    label = "RMSprop"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1e-2

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(RMSprop(training.model.parameters(), lr=lr))
