from stormplus_bench.train.solvers import sgd as Solver
