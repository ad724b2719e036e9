from stormplus_bench.train.solvers import mars as Solver
