"""Optimizers and models from user files: `stormplus compare --solver FILE --workload FILE`.

A file is ordinary Python; its variables say what to run. benchopt gets the file's path, so joblib,
Dask and SLURM workers read the same file.
"""

import math
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, signature
from numbers import Real
from pathlib import Path
from typing import Any

from stormplus.torch import PairedOptimizer
from stormplus_bench.methods import METHODS, TIERS
from stormplus_bench.train.steppers import AtAverage, OneGradient, Stepper, TwoGradients
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Network

Make = Callable[..., Any]  # (parameters) or (parameters, lr) -> optimizer
TEMPLATES = Path(__file__).parent / "templates"
NEEDED = ("model", "loss", "data", "budget")
ALLOWED = ("name", *NEEDED, "valid", "batch_size", "accuracy")


@dataclass(frozen=True)
class Method:
    """A user's method; without rates, `make` gets the parameters alone."""

    name: str
    make: Make
    rates: tuple[float, ...] = ()

    def stepper(self, training: Training, lr: float | None) -> Stepper:
        """Return how a run takes a step with this method."""
        parameters = training.model.parameters()
        made = self.make(parameters) if lr is None else self.make(parameters, lr)
        return stepper_of(made, self.name)


def method_of(name: Any, make: Any, rates: Any = ()) -> Method:
    """Return the method; a ValueError says which of its parts is wrong."""
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise ValueError(f"name should be a text of one line, got {name!r}")
    if not callable(make):
        raise ValueError(f"{name}: make should be a function, got {make!r}")
    numbers = list(rates) if isinstance(rates, Iterable) else [rates]
    if not all(isinstance(lr, Real) and math.isfinite(lr) for lr in numbers):
        raise ValueError(f"{name}: rates should be a list of numbers, got {rates!r}")
    return Method(name, make, tuple(map(float, numbers)))


def stepper_of(made: Any, name: str) -> Stepper:
    """Return the stepper for an optimizer, or `made` itself if it is a stepper.

    A PairedOptimizer gets two gradients per step; one with `train` and `eval` is measured at its
    average, as Untuned and Schedule-Free are.
    """
    if isinstance(made, Stepper):
        return made
    if not hasattr(made, "step") or not hasattr(made, "param_groups"):
        raise TypeError(f"{name}: make should return a torch.optim.Optimizer, got {made!r}")
    if isinstance(made, PairedOptimizer):
        return TwoGradients(made)
    closure = signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TypeError(
            f"{name}: {type(made).__name__}.step needs a closure, so its gradients cannot be "
            f"counted: return a Stepper, as {TEMPLATES / 'two_gradients.py'} does"
        )
    if hasattr(made, "eval") and hasattr(made, "train"):
        return AtAverage(made)
    return OneGradient(made)


def read_method(file: str) -> Method:
    """Return the method that a solver file defines; a ValueError says what is wrong with it."""
    found = _variables(file)
    if found.get("name") in METHODS:
        raise ValueError(f"{file}: {found['name']} is a method of the benchmark: rename yours")
    try:
        return method_of(found.get("name"), found.get("make"), found.get("rates") or None)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; an example is {TEMPLATES / 'solver.py'}") from error


def read_workload(file: str) -> Network:
    """Return the workload that a file defines; a ValueError says what is wrong with it."""
    found = {name: value for name, value in _variables(file).items() if name in ALLOWED}
    try:
        made = workload_of({"name": Path(file).stem, **found})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}; an example is {TEMPLATES / 'workload.py'}") from error
    if any(made.name in names for names in TIERS.values()):
        raise ValueError(f"{file}: {made.name} is a workload of the benchmark: choose another name")
    return made


def workload_of(parts: Mapping[str, Any]) -> Network:
    """Return the workload of a dict with the variables of a workload file."""
    if missing := [name for name in NEEDED if name not in parts]:
        raise ValueError(f"a workload needs {', '.join(missing)}")
    if unknown := sorted(set(parts) - set(ALLOWED)):
        raise ValueError(f"a workload has no {', '.join(unknown)}; it has {', '.join(ALLOWED)}")
    return Network(**{"name": "yours", **parts})


@lru_cache
def _variables(file: str) -> dict[str, Any]:
    """Run a file and return its variables; it may import modules next to it."""
    folder = str(Path(file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return runpy.run_path(file)
    except (Exception, SystemExit) as error:
        raise ValueError(described(error, file)) from error


def described(error: BaseException, file: str) -> str:
    """Return an error with the line of the user's file in which it happened."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else "?")
    return f"{file}, line {line}: {type(error).__name__}: {error}"
