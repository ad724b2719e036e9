from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.steppers import TwoGradients
from benchmark_utils.training import Training

from stormplus import SimplifiedStormPlus


class Solver(TorchSolver):
    """Simplified STORM+ (Levy et al. 2021, Sec. 4.2). Two gradients a step."""

    name = "simplified-storm-plus"
    label = "simplified STORM+"
    parameters = {"lr": [None], "norm": ["raw", "mean"]}
    requirements = ["pip::stormplus[bench]"]
    default_lr = 1.0

    @property
    def method(self) -> str:
        return self.label if self.norm == "raw" else f"{self.label} {self.norm}"

    def stepper(self, training: Training, lr: float) -> Any:
        return TwoGradients(SimplifiedStormPlus(training.model.parameters(), lr, norm=self.norm))
