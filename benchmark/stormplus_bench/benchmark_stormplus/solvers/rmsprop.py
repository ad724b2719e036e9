from stormplus_bench.train.solvers import rmsprop as Solver
