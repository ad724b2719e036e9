from dog import DoG, LDoG, PolynomialDecayAverager

from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Averaged


class Solver(TorchSolver):
    """DoG and L-DoG (Ivgi et al. 2023) with the averager that its documentation calls crucial.

    `reps_rel` as documented: 1e-6, or 1e-4 with BatchNorm.
    """

    name, label = "dog", "DoG"
    parameters = {"lr": [None], "layerwise": [False]}
    default_lr = 1.0

    @property
    def method(self):
        return "L-DoG" if self.layerwise else self.label

    def stepper(self, training, lr):
        reps_rel = 1e-4 if training.workload.batch_norm else 1e-6
        optimizer = (LDoG if self.layerwise else DoG)(training.parameters, reps_rel, lr)
        return Averaged(optimizer, PolynomialDecayAverager(training.model))
