from typing import Any

from benchmark_utils.solver import TorchSolver
from benchmark_utils.training import Training
from benchmark_utils.variance_reduction import Svrg


class Solver(TorchSolver):
    """SVRG (Johnson and Zhang 2013), where full gradients fit the budget.

    No package documents a default learning rate for it; 0.1 is run as one.
    """

    name = "svrg"
    label = "SVRG"
    requirements = ["pip::stormplus[bench]"]
    default_lr = 0.1

    def applies(self, workload: Any) -> tuple[bool, str | None]:
        if workload.batches * 4 > workload.budget:
            return True, "a full gradient takes more than a quarter of the budget"
        return False, None

    def stepper(self, training: Training, lr: float) -> Any:
        return Svrg(training.model, lr)
