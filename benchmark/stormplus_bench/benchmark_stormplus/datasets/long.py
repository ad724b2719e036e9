from stormplus_bench.train.datasets import long as Dataset
