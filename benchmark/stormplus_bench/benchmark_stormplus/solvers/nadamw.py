from stormplus_bench.train.nadamw import LEARNING_RATE, WARMUP, NadamW
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Scheduled


class Solver(TorchSolver):
    """NadamW at the setting of AlgoPerf's self-tuning baseline, warm-up and cosine."""

    name, label = "nadamw", "NadamW"
    default_lr = LEARNING_RATE

    def stepper(self, training, lr):
        optimizer = NadamW(training.parameters, lr=lr)
        return Scheduled(optimizer, training.workload.budget, WARMUP)
