from stormplus_bench.train.solvers import storm as Solver
