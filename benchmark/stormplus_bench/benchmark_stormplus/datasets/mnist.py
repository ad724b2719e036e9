from stormplus_bench.train.datasets import mnist as Dataset
