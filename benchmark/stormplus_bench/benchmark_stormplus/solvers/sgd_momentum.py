from stormplus_bench.train.solvers import sgd_momentum as Solver
