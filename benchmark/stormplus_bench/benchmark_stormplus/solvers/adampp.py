from stormplus_bench.train.adampp import AdamPlusPlus
from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """Adam++ (Tao et al. 2024), written from its paper; lr 1."""

    name, label = "adam-plus-plus", "Adam++"
    optimizer, default_lr = AdamPlusPlus, 1.0
