from torch.optim import RMSprop

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """torch.optim.RMSprop."""

    name, label = "rmsprop", "RMSprop"
    optimizer, default_lr = RMSprop, 1e-2
