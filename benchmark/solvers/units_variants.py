from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.training import Training
from benchmark_utils.units_variants import VARIANTS


class Solver(TorchSolver):
    """STORM+ in measured units with one thing changed: the study in docs/untuned.md."""

    name = "units-variants"
    label = "units"
    requirements = ["pip::stormplus[bench]"]
    parameters = {"lr": [None], "variant": ["no average"]}
    default_lr = 1.0

    @property
    def method(self) -> str:
        return f"{self.label}: {self.variant}"

    def stepper(self, training: Training, lr: float) -> Any:
        return VARIANTS[self.variant](training)
