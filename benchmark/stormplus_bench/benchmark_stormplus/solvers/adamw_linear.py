from torch.optim import AdamW

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Scheduled


class Solver(TorchSolver):
    """torch.optim.AdamW with a warm-up of 5%, as `adamw` with `cosine`, and a linear decay."""

    name, label = "adamw-linear", "AdamW linear"
    default_lr = 1e-3

    def stepper(self, training, lr):
        optimizer = AdamW(training.parameters, lr=lr)
        return Scheduled(optimizer, training.workload.budget, warmup=0.05, linear=True)
