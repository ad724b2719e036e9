from typing import Any

from benchopt import BaseDataset

from stormplus_bench.own import TEMPLATES, read_workload
from stormplus_bench.train.catalogue import or_reason


class Dataset(BaseDataset):
    """A model, a loss and data from a file: `stormplus compare --workload FILE`."""

    name = "own"
    parameters = {"file": [str(TEMPLATES / "workload.py")]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(lambda: read_workload(self.file))
