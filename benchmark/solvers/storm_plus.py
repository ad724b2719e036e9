from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import TwoGradients
from benchmark_utils.training import Training

from stormplus import StormPlus


class Solver(TorchSolver):
    """STORM+ (Levy et al. 2021, Algorithm 1). Two gradients a step."""

    name = "storm-plus"
    label = "STORM+"
    parameters = {"lr": [None], "norm": ["raw", "mean"]}
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1.0

    @property
    def method(self) -> str:
        return self.label if self.norm == "raw" else f"{self.label} {self.norm}"

    def stepper(self, training: Training, lr: float) -> Any:
        return TwoGradients(StormPlus(training.model.parameters(), lr, norm=self.norm))
