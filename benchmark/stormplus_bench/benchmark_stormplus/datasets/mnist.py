from stormplus_bench.train.catalogue import mnist
from stormplus_bench.train.solver import WorkloadDataset


class Dataset(WorkloadDataset):
    """A CNN and an autoencoder on MNIST (`stormplus data mnist`)."""

    name = "mnist"
    parameters = {"model": ["cnn", "autoencoder"], "budget": [None]}
    test_parameters = {"model": ["cnn"], "budget": [20]}

    def make_workload(self):
        return mnist(self.model)
