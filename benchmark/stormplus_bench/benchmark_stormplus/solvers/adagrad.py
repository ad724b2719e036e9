from torch.optim import Adagrad

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """torch.optim.Adagrad."""

    name, label = "adagrad", "AdaGrad"
    optimizer, default_lr = Adagrad, 1e-2
