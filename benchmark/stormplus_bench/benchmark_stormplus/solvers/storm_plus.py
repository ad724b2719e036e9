from stormplus import StormPlus
from stormplus_bench.train.solver import StormSolver


class Solver(StormSolver):
    """STORM+ (Levy et al. 2021, Algorithm 1)."""

    name, label = "storm-plus", "STORM+"
    optimizer = StormPlus
