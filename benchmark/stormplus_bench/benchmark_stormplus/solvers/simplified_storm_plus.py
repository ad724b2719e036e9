from stormplus_bench.train.solvers import solver

Solver = solver("simplified-storm-plus")
