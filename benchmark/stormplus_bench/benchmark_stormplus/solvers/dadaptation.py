from dadaptation import DAdaptAdam

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """D-Adaptation (Defazio and Mishchenko 2023), Adam variant; lr 1 as documented."""

    name, label = "dadaptation", "D-Adaptation"
    optimizer, default_lr = DAdaptAdam, 1.0
