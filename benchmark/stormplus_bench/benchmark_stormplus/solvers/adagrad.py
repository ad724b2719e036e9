from stormplus_bench.train.solvers import adagrad as Solver
