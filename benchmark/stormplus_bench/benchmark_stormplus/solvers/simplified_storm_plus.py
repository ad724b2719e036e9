from stormplus import SimplifiedStormPlus
from stormplus_bench.train.solver import StormSolver


class Solver(StormSolver):
    """Simplified STORM+ (Levy et al. 2021, Sec. 4.2)."""

    name, label = "simplified-storm-plus", "simplified STORM+"
    optimizer = SimplifiedStormPlus
