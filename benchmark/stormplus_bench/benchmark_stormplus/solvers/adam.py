from torch.optim import Adam

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """torch.optim.Adam."""

    name, label = "adam", "Adam"
    optimizer, default_lr = Adam, 1e-3
