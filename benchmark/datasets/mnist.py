from typing import Any

from benchmark_utils.availability import or_reason
from benchmark_utils.network_workloads import mnist
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """A CNN and an autoencoder on MNIST (`stormplus data mnist`)."""

    name = "mnist"
    parameters = {"model": ["cnn", "autoencoder"], "budget": [None]}
    test_parameters = {"model": ["cnn"], "budget": [20]}
    requirements = ["pip::stormplus[bench]"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(lambda: mnist(self.model), self.budget)
