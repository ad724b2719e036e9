from stormplus_bench.train.solvers import mars_approximate as Solver
