from stormplus_bench.train.datasets import smooth as Dataset
