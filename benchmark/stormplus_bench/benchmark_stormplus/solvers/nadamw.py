from stormplus_bench.train.optimizers import NadamW
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Scheduled


class Solver(TorchSolver):
    """NadamW as AlgoPerf's self-tuning baseline has it: calibrated constants, warm-up, cosine."""

    name, label = "nadamw", "NadamW"
    default_lr = NadamW.LR

    def stepper(self, training, lr):
        optimizer = NadamW(training.parameters, lr=lr)
        return Scheduled(optimizer, training.workload.budget, NadamW.WARMUP)
