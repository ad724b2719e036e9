from stormplus_bench.train.datasets import cifar10 as Dataset
