from stormplus_bench.train.solvers import svrg as Solver
