from stormplus_bench.train.catalogue import cifar10
from stormplus_bench.train.solver import WorkloadDataset


class Dataset(WorkloadDataset):
    """A BatchNorm CNN and a small ResNet on CIFAR-10 (`stormplus data cifar10`)."""

    name = "cifar10"
    parameters = {"model": ["bncnn", "resnet"], "budget": [None]}
    test_parameters = {"model": ["bncnn"], "budget": [20]}

    def make_workload(self):
        return cifar10(self.model)
