from stormplus_bench.train.solvers import schedule_free as Solver
