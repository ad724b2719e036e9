from stormplus_bench.train.one_optimizer import solver

Solver = solver("adam")
