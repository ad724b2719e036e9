from stormplus_bench.train.solvers import prodigy as Solver
