from stormplus_bench.train.solvers import untuned as Solver
