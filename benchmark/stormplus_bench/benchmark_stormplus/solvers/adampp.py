from stormplus_bench.train.solvers import adam_plus_plus as Solver
