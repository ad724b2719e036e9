from dog import PolynomialDecayAverager
from torch.optim import AdamW

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Averaged


class Solver(TorchSolver):
    """torch.optim.AdamW, measured at DoG's average of the iterates, with weights like t^8."""

    name, label = "adamw-average", "AdamW average"
    default_lr = 1e-3

    def stepper(self, training, lr):
        averager = PolynomialDecayAverager(training.model)
        return Averaged(AdamW(training.parameters, lr=lr), averager)
