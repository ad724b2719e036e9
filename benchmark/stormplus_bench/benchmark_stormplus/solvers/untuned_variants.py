from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.variants import VARIANTS


class Solver(TorchSolver):
    """Untuned with one thing changed: the study in docs/untuned.md."""

    name = "untuned-variants"
    label = "Untuned"
    requirements = ["pip::stormplus-bench"]
    parameters = {"lr": [None], "variant": ["four buffers"]}
    default_lr = 1.0

    @property
    def method(self) -> str:
        return f"{self.label}: {self.variant}"

    def stepper(self, training: Training, lr: float) -> Stepper:
        return VARIANTS[self.variant](training)
