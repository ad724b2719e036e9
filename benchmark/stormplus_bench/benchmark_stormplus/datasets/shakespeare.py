from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import or_reason, shakespeare


class Dataset(BaseDataset):
    """A small GPT on the characters of Shakespeare (`stormplus data shakespeare`)."""

    name = "shakespeare"
    parameters = {"budget": [None]}
    test_parameters = {"budget": [20]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(shakespeare, self.budget)
