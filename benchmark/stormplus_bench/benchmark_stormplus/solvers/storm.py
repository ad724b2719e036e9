from stormplus import Storm
from stormplus_bench.train.solver import StormSolver


class Solver(StormSolver):
    """STORM (Cutkosky and Orabona 2019) with the constants of its paper."""

    name, label = "storm", "STORM"
    optimizer = Storm
