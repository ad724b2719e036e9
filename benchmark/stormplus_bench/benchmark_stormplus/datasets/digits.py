from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import digits, or_reason


class Dataset(BaseDataset):
    """An MLP and a CNN on the digits inside scikit-learn."""

    name = "digits"
    parameters = {"model": ["mlp", "cnn"], "budget": [None]}
    test_parameters = {"model": ["mlp"], "budget": [20]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(lambda: digits(self.model), self.budget)
