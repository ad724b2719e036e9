from stormplus_bench.train.solvers import l_dog as Solver
