from torch.optim import Adagrad

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """torch.optim.Adagrad."""

    name = "adagrad"
    label = "AdaGrad"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1e-2

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(Adagrad(training.model.parameters(), lr=lr))
