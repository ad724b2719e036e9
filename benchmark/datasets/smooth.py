from typing import Any

from benchmark_utils.availability import or_reason
from benchmark_utils.smooth_workloads import MAKERS
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """Smooth non-convex problems on data inside scikit-learn."""

    name = "smooth"
    parameters = {"problem": list(MAKERS), "budget": [None]}
    test_parameters = {"problem": ["logistic-breast-cancer"], "budget": [200]}
    requirements = ["pip::stormplus[bench]"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(MAKERS[self.problem], self.budget)
