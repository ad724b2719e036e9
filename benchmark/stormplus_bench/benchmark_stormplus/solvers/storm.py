from stormplus import Storm
from stormplus_bench.train.solver import StormSolver


class Solver(StormSolver):
    """STORM (Cutkosky and Orabona 2019) at the constants of its paper. Two gradients a step."""

    name = "storm"
    label = "STORM"
    requirements = ["pip::stormplus-bench"]
    optimizer = Storm
