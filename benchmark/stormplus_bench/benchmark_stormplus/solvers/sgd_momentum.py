from torch.optim import SGD

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """torch.optim.SGD with momentum 0.9."""

    name = "sgd-momentum"
    label = "SGD momentum"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1e-3

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OneGradient(SGD(training.model.parameters(), lr=lr, momentum=0.9))
