from stormplus_bench.train.catalogue import digits
from stormplus_bench.train.solver import WorkloadDataset


class Dataset(WorkloadDataset):
    """An MLP and a CNN on the digits inside scikit-learn."""

    name = "digits"
    parameters = {"model": ["mlp", "cnn"], "budget": [None]}
    test_parameters = {"model": ["mlp"], "budget": [20]}

    def make_workload(self):
        return digits(self.model)
