from stormplus_bench.train.datasets import dataset

Dataset = dataset("digits")
