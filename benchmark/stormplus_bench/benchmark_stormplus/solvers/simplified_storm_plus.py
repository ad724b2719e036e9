from stormplus import SimplifiedStormPlus
from stormplus_bench.train.solver import StormSolver


class Solver(StormSolver):
    """Simplified STORM+ (Levy et al. 2021, Sec. 4.2). Two gradients a step."""

    name = "simplified-storm-plus"
    label = "simplified STORM+"
    requirements = ["pip::stormplus-bench"]
    optimizer = SimplifiedStormPlus
