"""The data sets of the benchmark, in a table: benchopt wants a file for each of them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from benchopt import BaseDataset

from stormplus_bench.data import MissingData
from stormplus_bench.train.catalogue import NETWORKS, SMOOTH
from stormplus_bench.train.long import LONG
from stormplus_bench.train.small_data import SMALL_DATA
from stormplus_bench.train.workload import Workload

# By name in suites: the name of the parameter that selects a workload, and the workloads.
TABLE: dict[str, tuple[str, Mapping[str, Callable[[], Workload]]]] = {
    "smooth": ("problem", SMOOTH),
    **{name: ("model", makes) for name, makes in NETWORKS.items()},
    "long": ("workload", LONG),
    "small-data": ("workload", SMALL_DATA),
}


class WorkloadDataset(BaseDataset):  # type: ignore[misc]
    """A data set that makes a workload; `budget` replaces the workload's own."""

    requirements = ["pip::stormplus-bench"]

    @abstractmethod
    def make_workload(self) -> Workload:
        """Return the workload; raise MissingData if its data is missing."""

    def get_data(self) -> dict[str, Any]:
        try:
            workload = self.make_workload()
        except MissingData as missing:
            return {"workload": None, "reason": str(missing)}
        workload.set_budget(getattr(self, "budget", None))
        return {"workload": workload, "reason": None}


def dataset(name: str) -> type[WorkloadDataset]:
    """Return the benchopt data set of a line of the table."""
    selector, makes = TABLE[name]
    about = {
        "name": name,
        "parameters": {selector: list(makes), "budget": [None]},
        "test_parameters": {selector: [next(iter(makes))], "budget": [200]},
        "make_workload": lambda self: makes[getattr(self, selector)](),
    }
    return type("Dataset", (WorkloadDataset,), about)
