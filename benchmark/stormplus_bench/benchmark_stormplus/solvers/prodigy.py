from prodigyopt import Prodigy

from stormplus_bench.train.solver import OneGradientSolver


class Solver(OneGradientSolver):
    """Prodigy (Mishchenko and Defazio 2024), lr 1 and optionally a cosine, as documented."""

    name, label = "prodigy", "Prodigy"
    optimizer, default_lr = Prodigy, 1.0
