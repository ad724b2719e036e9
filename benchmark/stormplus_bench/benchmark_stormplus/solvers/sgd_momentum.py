from torch.optim import SGD

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """torch.optim.SGD with momentum 0.9."""

    name, label = "sgd-momentum", "SGD momentum"
    optimizer, default_lr = SGD, 1e-3
    options = {"momentum": 0.9}
