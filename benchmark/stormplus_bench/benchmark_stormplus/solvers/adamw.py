from torch.optim import AdamW

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """torch.optim.AdamW, weight decay 0.01 as by default; with `cosine` a warm-up of 5%."""

    name, label = "adamw", "AdamW"
    optimizer, default_lr = AdamW, 1e-3
    warmup = 0.05
