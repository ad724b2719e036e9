from mechanic_pytorch import mechanize
from torch.optim import AdamW

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """Mechanic (Cutkosky et al. 2023) around AdamW; lr 1 as documented."""

    name, label = "mechanic", "Mechanic"
    optimizer, default_lr = mechanize(AdamW), 1.0
