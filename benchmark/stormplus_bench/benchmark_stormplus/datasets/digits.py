from stormplus_bench.train.datasets import digits as Dataset
