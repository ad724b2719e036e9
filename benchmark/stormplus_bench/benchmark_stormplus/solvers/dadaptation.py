from stormplus_bench.train.solvers import dadaptation as Solver
