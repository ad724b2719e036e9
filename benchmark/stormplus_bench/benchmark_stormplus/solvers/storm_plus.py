from stormplus_bench.train.solvers import storm_plus as Solver
