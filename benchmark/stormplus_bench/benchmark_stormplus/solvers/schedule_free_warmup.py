from stormplus_bench.train.solvers import schedule_free_warmup as Solver
