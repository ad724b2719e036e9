from dog import DoG, PolynomialDecayAverager

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Averaged


class Solver(TorchSolver):
    """DoG (Ivgi et al. 2023) with its averager, which its documentation calls crucial.

    `reps_rel` as documented: 1e-6, or 1e-4 with BatchNorm.
    """

    name, label = "dog", "DoG"
    default_lr = 1.0

    def stepper(self, training, lr):
        reps_rel = 1e-4 if training.workload.batch_norm else 1e-6
        optimizer = DoG(training.parameters, lr=lr, reps_rel=reps_rel)
        return Averaged(optimizer, PolynomialDecayAverager(training.model))
