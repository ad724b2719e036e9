from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import course, or_reason, paper


class Dataset(BaseDataset):
    """The paper's experiment: ResNet34 on CIFAR-10 (`stormplus data cifar10`).

    With `epochs` every method sees so many, and `budget` is not used.
    """

    name = "paper"
    parameters = {"images": [50_000], "budget": [1000], "epochs": [None]}
    test_parameters = {"images": [200], "budget": [2], "epochs": [None]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        if self.epochs is not None:
            return or_reason(lambda: course(self.images, self.epochs))
        return or_reason(lambda: paper(self.images, self.budget))
