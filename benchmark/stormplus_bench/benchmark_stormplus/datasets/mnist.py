from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import mnist, or_reason


class Dataset(BaseDataset):
    """A CNN and an autoencoder on MNIST (`stormplus data mnist`)."""

    name = "mnist"
    parameters = {"model": ["cnn", "autoencoder"], "budget": [None]}
    test_parameters = {"model": ["cnn"], "budget": [20]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(lambda: mnist(self.model), self.budget)
