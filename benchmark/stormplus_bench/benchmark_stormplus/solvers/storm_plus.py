from stormplus import StormPlus
from stormplus_bench.train.solver import StormSolver


class Solver(StormSolver):
    """STORM+ (Levy et al. 2021, Algorithm 1). Two gradients a step."""

    name = "storm-plus"
    label = "STORM+"
    requirements = ["pip::stormplus-bench"]
    optimizer = StormPlus
