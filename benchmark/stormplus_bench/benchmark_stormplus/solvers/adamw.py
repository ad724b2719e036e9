from stormplus_bench.train.solvers import adamw as Solver
