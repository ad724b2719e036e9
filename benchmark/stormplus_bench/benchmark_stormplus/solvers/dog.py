from stormplus_bench.train.solvers import dog as Solver
