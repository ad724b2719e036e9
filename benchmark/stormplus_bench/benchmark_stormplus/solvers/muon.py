from stormplus_bench.train.solvers import muon as Solver
