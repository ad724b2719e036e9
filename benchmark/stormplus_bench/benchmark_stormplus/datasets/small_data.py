from stormplus_bench.train.datasets import small_data as Dataset
