from stormplus_bench.own import TEMPLATES, read_method
from stormplus_bench.train.solver import TorchSolver


class Solver(TorchSolver):
    """An optimizer from a file: `stormplus compare --solver FILE`."""

    name = "own"
    parameters = {"lr": [None], "file": [str(TEMPLATES / "solver.py")]}

    @property
    def method(self):
        return read_method(self.file).name

    @property
    def default_lr(self):
        return read_method(self.file).rates[0]

    def stepper(self, training, lr):
        return read_method(self.file).stepper(training, lr)
