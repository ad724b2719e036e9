"""The data sets of the benchmark; benchopt wants a file for each, which imports it from here."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from benchopt import BaseDataset

from stormplus_bench.data import MissingData
from stormplus_bench.train.catalogue import NETWORKS, SMOOTH
from stormplus_bench.train.long import LONG
from stormplus_bench.train.small_data import SMALL_DATA
from stormplus_bench.train.workload import Workload


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


def dataset(
    name: str, makes: Mapping[str, Callable[[], Workload]], selector: str = "model"
) -> type[WorkloadDataset]:
    """Return the data set with this name in suites; the parameter `selector` selects a workload."""
    about = {
        "name": name,
        "parameters": {selector: list(makes), "budget": [None]},
        "test_parameters": {selector: [next(iter(makes))], "budget": [200]},
        "make_workload": lambda self: makes[getattr(self, selector)](),
    }
    return type("Dataset", (WorkloadDataset,), about)


smooth = dataset("smooth", SMOOTH, "problem")
digits = dataset("digits", NETWORKS["digits"])
mnist = dataset("mnist", NETWORKS["mnist"])
cifar10 = dataset("cifar10", NETWORKS["cifar10"])
shakespeare = dataset("shakespeare", NETWORKS["shakespeare"])
long = dataset("long", LONG, "workload")
small_data = dataset("small-data", SMALL_DATA, "workload")
