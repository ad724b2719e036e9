from schedulefree import AdamWScheduleFree

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import AtAverage


class Solver(TorchSolver):
    """Schedule-Free AdamW (Defazio et al. 2024).

    `warmup` is the share of the budget in which its rate rises.
    """

    name, label = "schedule-free", "Schedule-Free"
    parameters = {"lr": [None], "warmup": [0.0]}
    default_lr = 0.0025

    @property
    def method(self):
        return f"{self.label} warm-up" if self.warmup else self.label

    def stepper(self, training, lr):
        rising = round(self.warmup * training.workload.budget)
        return AtAverage(AdamWScheduleFree(training.parameters, lr=lr, warmup_steps=rising))
