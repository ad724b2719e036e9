from stormplus_bench.train.catalogue import shakespeare
from stormplus_bench.train.solver import WorkloadDataset


class Dataset(WorkloadDataset):
    """A small GPT on the characters of Shakespeare (`stormplus data shakespeare`)."""

    name = "shakespeare"
    parameters = {"budget": [None]}
    test_parameters = {"budget": [20]}

    def make_workload(self):
        return shakespeare()
