from stormplus_bench.train.solvers import simplified_storm_plus as Solver
