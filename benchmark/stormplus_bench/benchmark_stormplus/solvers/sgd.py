from torch.optim import SGD

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """torch.optim.SGD."""

    name, label = "sgd", "SGD"
    optimizer, default_lr = SGD, 1e-3
