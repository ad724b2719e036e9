from torch.optim import AdamW

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Scheduled, Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """torch.optim.AdamW as it is used: a warm-up of 5% of the budget, then a cosine to zero."""

    name = "adamw-cosine"
    label = "AdamW cosine"
    requirements = ["pip::stormplus-bench"]
    default_lr = 1e-3

    def stepper(self, training: Training, lr: float) -> Stepper:
        optimizer = AdamW(training.parameters, lr=lr)
        return Scheduled(optimizer, training.workload.budget, warmup=0.05)
