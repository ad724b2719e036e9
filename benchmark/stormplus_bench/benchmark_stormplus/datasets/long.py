from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import or_reason
from stormplus_bench.train.long import LONG


class Dataset(BaseDataset):
    """Thousands of steps on CIFAR-10, MNIST and Shakespeare (`stormplus data`)."""

    name = "long"
    parameters = {"workload": list(LONG), "budget": [None]}
    test_parameters = {"workload": ["autoencoder-mnist"], "budget": [20]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(LONG[self.workload], self.budget)
