from stormplus_bench.own import TEMPLATES, Method, read_method
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import Stepper
from stormplus_bench.train.training import Training


class Solver(TorchSolver):
    """An optimizer from a file: `stormplus compare --solver FILE`."""

    name = "own"
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

    def stepper(self, training: Training, lr: float) -> Stepper:
        return self.read.stepper(training, lr)
