from stormplus_bench.train.long import LONG
from stormplus_bench.train.solver import WorkloadDataset


class Dataset(WorkloadDataset):
    """Thousands of steps on CIFAR-10, MNIST and Shakespeare (`stormplus data`)."""

    name = "long"
    parameters = {"workload": list(LONG), "budget": [None]}
    test_parameters = {"workload": ["autoencoder-mnist"], "budget": [20]}

    def make_workload(self):
        return LONG[self.workload]()
