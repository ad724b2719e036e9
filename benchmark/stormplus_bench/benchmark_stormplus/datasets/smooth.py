from stormplus_bench.train.catalogue import SMOOTH
from stormplus_bench.train.solver import WorkloadDataset


class Dataset(WorkloadDataset):
    """Smooth non-convex problems on data inside scikit-learn."""

    name = "smooth"
    parameters = {"problem": list(SMOOTH), "budget": [None]}
    test_parameters = {"problem": ["logistic-breast-cancer"], "budget": [200]}

    def make_workload(self):
        return SMOOTH[self.problem]()
