from stormplus_bench.own import TEMPLATES, read_workload
from stormplus_bench.train.datasets import WorkloadDataset


class Dataset(WorkloadDataset):
    """A model, a loss and data from a file: `stormplus compare --workload FILE`."""

    name = "own"
    parameters = {"file": [str(TEMPLATES / "workload.py")]}

    def make_workload(self):
        return read_workload(self.file)
