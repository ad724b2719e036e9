from typing import Any

from benchopt import BaseDataset

from stormplus_bench.train.catalogue import SMOOTH, or_reason


class Dataset(BaseDataset):
    """Smooth non-convex problems on data inside scikit-learn."""

    name = "smooth"
    parameters = {"problem": list(SMOOTH), "budget": [None]}
    test_parameters = {"problem": ["logistic-breast-cancer"], "budget": [200]}
    requirements = ["pip::stormplus-bench"]

    def get_data(self) -> dict[str, Any]:
        return or_reason(SMOOTH[self.problem], self.budget)
