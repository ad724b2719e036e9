from stormplus_bench.own import TEMPLATES, Method, fingerprint, read_method
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


class Solver(TorchSolver):
    """An optimizer from a file of one's own: `stormplus compare --solver FILE`."""

    name = "own"
    requirements = ["pip::stormplus-bench"]
    parameters = {"lr": [None], "file": [str(TEMPLATES / "solver.py")]}

    @property
    def read(self) -> Method:
        return read_method(self.file)

    @property
    def method(self) -> str:
        return self.read.name

    @property
    def default_lr(self) -> float:
        return self.read.rates[0]

    def set_objective(self, workload: Workload, seed: int) -> None:
        super().set_objective(workload, seed)
        self.run_info["files"] = {"method": fingerprint(self.file)}

    def stepper(self, training: Training, lr: float) -> Stepper:
        return self.read.stepper(training, lr)
