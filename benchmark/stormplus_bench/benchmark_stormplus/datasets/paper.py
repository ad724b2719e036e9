from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import or_reason, paper


class Dataset(BaseDataset):
    """The paper's experiment: ResNet34 on CIFAR-10 (`stormplus data cifar10`)."""

    name = "paper"
    parameters = {"images": [50_000], "budget": [1000]}
    test_parameters = {"images": [200], "budget": [2]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(lambda: paper(self.images, self.budget))
