from stormplus_bench.train.optimizers import ScheduleFreePlus
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import AtAverageWithLoss


class Solver(TorchSolver):
    """ScheduleFree+ (Defazio 2026): no learning rate; lr 1 multiplies its step, as documented."""

    name, label = "schedule-free-plus", "ScheduleFree+"
    default_lr = 1.0

    def stepper(self, training, lr):
        return AtAverageWithLoss(ScheduleFreePlus(training.parameters, lr=lr))
