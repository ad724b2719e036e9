from stormplus_bench.train.solvers import solver

Solver = solver("adagrad")
