from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Svrg


class Solver(TorchSolver):
    """SVRG (Johnson and Zhang 2013), if full gradients fit the budget.

    No package documents a default learning rate; 0.1 is used.
    """

    name, label = "svrg", "SVRG"
    default_lr = 0.1

    def reason_to_skip(self, workload):
        if workload.batches * 4 > workload.budget:
            return "a full gradient takes more than a quarter of the budget"
        return None

    def stepper(self, training, lr):
        return Svrg(training.model, lr)
