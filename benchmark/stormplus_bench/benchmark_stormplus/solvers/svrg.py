from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Stepper, Svrg
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


class Solver(TorchSolver):
    """SVRG (Johnson and Zhang 2013), if full gradients fit the budget.

    No package documents a default learning rate; 0.1 is used.
    """

    name, label = "svrg", "SVRG"
    default_lr = 0.1

    def applies(self, workload: Workload) -> tuple[bool, str | None]:
        if workload.batches * 4 > workload.budget:
            return True, "a full gradient takes more than a quarter of the budget"
        return False, None

    def stepper(self, training: Training, lr: float) -> Stepper:
        return Svrg(training.model, lr)
