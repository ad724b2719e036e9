from stormplus_bench.train.solvers import mechanic as Solver
