from typing import Any

from benchmark_utils.availability import or_reason
from benchmark_utils.network_workloads import shakespeare
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """A small GPT on the characters of Shakespeare (`stormplus data shakespeare`)."""

    name = "shakespeare"
    parameters = {"budget": [None]}
    test_parameters = {"budget": [20]}
    requirements = ["pip::stormplus[bench]"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(shakespeare, self.budget)
