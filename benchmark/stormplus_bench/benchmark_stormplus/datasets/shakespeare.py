from stormplus_bench.train.datasets import shakespeare as Dataset
