from stormplus_bench.train.solvers import adam as Solver
