from stormplus_bench.train.solvers import nadamw as Solver
