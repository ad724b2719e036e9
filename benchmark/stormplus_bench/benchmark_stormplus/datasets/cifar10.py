from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import cifar10, or_reason


class Dataset(BaseDataset):
    """A BatchNorm CNN and a small ResNet on CIFAR-10 (`stormplus data cifar10`)."""

    name = "cifar10"
    parameters = {"model": ["bncnn", "resnet"], "budget": [None]}
    test_parameters = {"model": ["bncnn"], "budget": [20]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(lambda: cifar10(self.model), self.budget)
