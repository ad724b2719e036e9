from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import AtAverage
from benchmark_utils.training import Training

from stormplus import Untuned


class Solver(TorchSolver):
    """STORM+ in measured units, beyond the paper: one gradient a step; lr 1 as documented."""

    name = "storm-plus-units"
    label = "Untuned"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1.0

    def stepper(self, training: Training, lr: float) -> Any:
        return AtAverage(Untuned(training.model.parameters(), lr))
