"""An optimizer and a model of one's own, beside those of the benchmark.

From Python, `compare`. From files, `stormplus compare SUITE --solver FILE --workload FILE`: a file
is ordinary Python, and what it has to say it says by the names of its variables. The command hands
the file's path to benchopt, so that joblib, Dask and SLURM read the same file.
"""

from __future__ import annotations

import copy
import math
import operator
import runpy
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from stormplus.progress import Pulse
from stormplus.torch import PairedOptimizer
from stormplus_bench import finals, rows
from stormplus_bench.methods import METHODS, TIERS, ordered
from stormplus_bench.train.catalogue import EVERY
from stormplus_bench.train.steppers import AtAverage, OneGradient, Stepper, TwoGradients
from stormplus_bench.train.training import Training, row_of
from stormplus_bench.train.workload import Workload, has_batch_norm, seeded

Make = Callable[..., Any]  # parameters, or parameters and a rate -> an optimizer
MEASURED = 2000  # examples of each split
AT_ONCE = 500  # of them
TEMPLATES = Path(__file__).parent / "templates"  # a file of each kind, to start from
SOLVER = """A solver's file has these variables:
    name = "Mine"                 as tables and figures call it
    rates = [0.01, 0.1]           learning rates; the first is its default
    def make(parameters, lr):     a torch.optim.Optimizer"""
WORKLOAD = """A workload's file has these variables:
    def model():                  a torch.nn.Module; the seed is set before
    def loss(model, batch):       a loss to differentiate
    data                          (inputs, targets), or a torch Dataset
    budget = 1000                 gradient evaluations of a run
and may have name (else the file's), valid (as data), batch_size (else 32),
and accuracy(model, batch)."""


@dataclass(frozen=True)
class Method:
    """A method of one's own.

    Attributes:
        name: As tables and figures call it.
        make: Makes its optimizer, from the parameters alone if there are no rates.
        rates: Learning rates to run; the first is the default.
    """

    name: str
    make: Make
    rates: tuple[float, ...] = ()

    def stepper(self, training: Training, lr: float | None) -> Stepper:
        """How a run takes a step with it."""
        parameters = training.model.parameters()
        made = self.make(parameters) if lr is None else self.make(parameters, lr)
        return stepper_of(made, self.name)


def stepper_of(made: Any, name: str) -> Stepper:
    """How to take a step with an optimizer, whatever kind it is.

    Two gradients for ours that take two; the average where the optimizer keeps it, as Untuned and
    Schedule-Free do. A `Stepper` is taken as it is.
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
            f"{name}: {type(made).__name__}.step needs a closure, so that the gradients of a step "
            "cannot be counted: return a stormplus_bench.train.steppers.Stepper instead"
        )
    if hasattr(made, "eval") and hasattr(made, "train"):
        return AtAverage(made)
    return OneGradient(made)


class OwnWorkload(Workload):
    """A model, a loss, data and a budget; the arguments are the variables of a workload's file.

    Args:
        name: As tables and figures call it.
        model: Makes the model; the seed is set before it is called. Or a model, with the weights
            to start from. What is trained is a copy.
        loss: Of the model and a batch: what is differentiated.
        data: (inputs, targets) or more tensors or arrays of one length, a torch Dataset, or a
            function that returns one of these.
        budget: Gradient evaluations that a run may spend.
        valid: Data that is not trained on, if there is any.
        batch_size: Examples of a batch.
        accuracy: Of the model and a batch, if it makes sense.
    """

    def __init__(
        self,
        name: str,
        model: Callable[[], nn.Module] | nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        data: Any,
        budget: int,
        *,
        valid: Any = None,
        batch_size: int = 32,
        accuracy: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        for what, value in (("model", model), ("loss", loss)):
            if not callable(value):
                raise TypeError(f"{name}: {what} should be a function, got {value!r}")
        for what, number in (("budget", budget), ("batch_size", batch_size)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}: {what} should be a positive int, got {number!r}")
        self.name, self.budget, self.batch_size = name, budget, batch_size
        self.make = (lambda: model) if isinstance(model, nn.Module) else model
        self.criterion, self.accuracy = loss, accuracy
        self.train = _examples(data, f"{name}: data")
        self.valid = None if valid is None else _examples(valid, f"{name}: valid")
        self.batches = math.ceil(_length(self.train) / batch_size)
        self.measured = min(MEASURED, _length(self.train))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def model(self, seed: int) -> nn.Module:
        model = copy.deepcopy(seeded(self.make, seed))  # it may be the same object each time
        self.batch_norm = has_batch_norm(model)
        return model

    def samples(self, seed: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1000 + seed)
        length = _length(self.train)
        while True:  # epochs without replacement, the last short batch left out
            order = torch.randperm(length, generator=generator)
            for chosen in order.split(self.batch_size):
                if len(chosen) == min(self.batch_size, length):
                    yield _batch(self.train, chosen)

    def loss(self, model: nn.Module, sample: Any) -> Tensor:
        return self.criterion(model, _to(sample, self.device))

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        found = {}
        for split, examples in (("train", self.train), ("valid", self.valid)):
            if examples is None:
                continue
            places = torch.arange(min(MEASURED, _length(examples))).split(AT_ONCE)
            batches = [_to(_batch(examples, chosen), self.device) for chosen in places]
            sizes = [len(chosen) / sum(map(len, places)) for chosen in places]
            measures: dict[str, Any] = {"loss": self.criterion, "accuracy": self.accuracy}
            for what, of in measures.items():
                if of is not None:
                    values = [float(of(model, batch)) for batch in batches]
                    found[f"{split}_{what}"] = sum(v * size for v, size in zip(values, sizes))
        model.train()
        return found

    def full_loss(self, model: nn.Module) -> Tensor:
        return self.loss(model, _batch(self.train, torch.arange(_length(self.train))))


_ARRAYS = (Tensor, np.ndarray)


def _examples(data: Any, where: str) -> Any:
    if isinstance(data, DataLoader):
        raise TypeError(
            f"{where} should be the data set, not its DataLoader: every method is to see the same "
            "batches, which the benchmark draws"
        )
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        data = data()
    if isinstance(data, Sequence) and data and all(isinstance(part, _ARRAYS) for part in data):
        data = tuple(map(torch.as_tensor, data))
        if len({len(part) for part in data}) > 1:
            raise ValueError(f"{where}: lengths differ, {[len(part) for part in data]}")
    elif isinstance(data, (Mapping, str)) or not (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        raise TypeError(
            f"{where} should be (inputs, targets), or a torch Dataset with a length, got {data!r}"
        )
    if _length(data) == 0:
        raise ValueError(f"{where} is empty")
    return data


def _length(examples: Any) -> int:
    return len(examples[0]) if _tensors(examples) else len(examples)


def _tensors(examples: Any) -> bool:
    return isinstance(examples, tuple) and isinstance(examples[0], Tensor)


def _batch(examples: Any, chosen: Tensor) -> Any:
    if _tensors(examples):
        return tuple(part[chosen] for part in examples)
    return default_collate([examples[i] for i in chosen.tolist()])


def _to(batch: Any, device: str) -> Any:
    if isinstance(batch, Mapping):
        return {name: _to(part, device) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_to(part, device) for part in batch)
    return batch.to(device) if isinstance(batch, Tensor) else batch


def read_method(file: str) -> Method:
    """The method of a solver's file.

    Raises:
        ValueError: Something is missing or wrong; the message says what a file should have.
    """
    parts = _variables(file)
    name, make, rates = (parts.get(key) for key in ("name", "make", "rates"))
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file}: name should be a text, got {name!r}.\n{SOLVER}")
    if name in METHODS:
        raise ValueError(f"{file}: {name} is a method of the benchmark: give yours another name")
    if not callable(make):
        raise ValueError(f"{file}: make should be a function, got {make!r}.\n{SOLVER}")
    numbers = list(rates) if isinstance(rates, Iterable) else []
    if not numbers or not all(isinstance(lr, int | float) and math.isfinite(lr) for lr in numbers):
        raise ValueError(f"{file}: rates should be a list of numbers, got {rates!r}.\n{SOLVER}")
    return Method(name, make, tuple(map(float, numbers)))


def read_workload(file: str) -> OwnWorkload:
    """The workload of a file.

    Raises:
        ValueError: Something is missing or wrong; the message says what a file should have.
    """
    parts = _variables(file)
    try:
        made = workload_of({"name": Path(file).stem, **parts}, ignore_others=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}\n{WORKLOAD}") from error
    made.version = fingerprint(file)
    if any(made.name in names for names in TIERS.values()):
        raise ValueError(
            f"{file}: {made.name} is a workload of the benchmark: name yours otherwise"
        )
    return made


def workload_of(parts: Mapping[str, Any], *, ignore_others: bool = False) -> OwnWorkload:
    """A workload from the variables of its file, or from a dict of the same names."""
    known = [name for name in signature(OwnWorkload).parameters if name != "self"]
    if missing := [name for name in ("model", "loss", "data", "budget") if name not in parts]:
        raise ValueError(f"a workload needs {', '.join(missing)}")
    if not ignore_others and (others := sorted(set(parts) - set(known))):
        raise ValueError(f"a workload has no {', '.join(others)}; it has {', '.join(known)}")
    return OwnWorkload(**{"name": "yours"} | {n: parts[n] for n in known if n in parts})


def fingerprint(file: str) -> str:
    """Changes when the file does: rows of another version of it must not pass for new ones."""
    return f"{zlib.crc32(Path(file).read_bytes()):08x}"


def _variables(file: str) -> dict[str, Any]:
    return _run(file, fingerprint(file))


@lru_cache
def _run(file: str, _version: str) -> dict[str, Any]:
    """What a file defines; it may import what lies beside it."""
    beside = str(Path(file).resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    try:
        return runpy.run_path(file)
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else "?")
        raise ValueError(f"{file}, line {line}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: a table, a picture, and the rows behind them.

    In a notebook it shows itself.
    """

    rows: tuple[dict[str, Any], ...]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line for each measurement of each run, as `stormplus_bench.rows.load` gives it."""
        return rows.frame_of(rows.finite(list(self.rows)))

    @property
    def table(self) -> pd.DataFrame:
        """A line for each method, the lowest final loss first; each at the best rate it was run."""
        ends = finals.tuned(self.frame).set_index("method").loc[ordered(self.frame["method"])]
        columns = {
            "loss": "training loss",
            "low": "lowest",
            "high": "highest",
            "valid_loss": "validation loss",
            "valid_accuracy": "validation accuracy",
            "lr": "lr",
            "seeds": "seeds",
            "diverged": "diverged",
            "seconds": "seconds",
            "state_mb": "state, MB",
        }
        table = ends.sort_values("loss", kind="stable")[list(columns)].rename(columns=columns)
        return table.dropna(axis="columns", how="all")

    def plot(self) -> Any:
        """The curves as a matplotlib figure, each method at the rate that the table has.

        If all of them have several rates, the defaults are drawn beside these.
        """
        from stormplus_bench.figures import curves, curves_grid

        (workload,) = self.frame["workload"].unique()
        several = self.frame.groupby("method")["lr"].nunique() > 1
        if several.all():
            return curves(self.frame, workload)
        best = self.frame["method"].map(self.table["lr"])
        kept = (self.frame["lr"] == best) | (best.isna() & self.frame["default"])
        shown = self.frame[kept].assign(default=True)
        return curves_grid(shown, each="each at the lr of the table" if several.any() else None)

    def save(self, journal: str | Path) -> Path:
        """Append the rows to a journal, which `stormplus report` merges with others."""
        path = Path(journal)
        path.parent.mkdir(parents=True, exist_ok=True)
        for row in self.rows:
            rows.append(path, row)
        return path

    def __str__(self) -> str:
        return str(self.table.to_string(float_format="{:.4g}".format))

    def _repr_html_(self) -> str:
        from stormplus_bench.svg import inline, to_svg

        drawn = inline(to_svg(self.plot(), "compare"), f"Training loss. {self}")
        return f"{self.table.to_html(float_format='{:.4g}'.format)}{drawn}"


def compare(
    methods: Mapping[str, Make | tuple[Make, Sequence[float]]],
    workload: str | Mapping[str, Any] | Workload,
    *,
    seeds: int | Iterable[int] = 1,
    progress: bool = True,
) -> Comparison:
    """Train a model with several optimizers, at equal numbers of gradient evaluations.

    Every method starts at the same point and sees the same batches. One that takes two gradients a
    step takes half as many steps.

    Args:
        methods: By name, what makes the optimizer from the parameters: a class will do. For
            several learning rates a pair (make, rates), and then `make(parameters, lr)`; the first
            is the default.
        workload: A dict with model, loss, data, budget and what else `OwnWorkload` takes; or the
            name of one of the benchmark's, such as "mlp-digits".
        seeds: How many, or which.
        progress: Whether to show how far it is, on the standard error stream.

    Returns:
        The table and the picture; see `Comparison`.
    """
    task = _workload(workload)
    chosen = [operator.index(seed) for seed in _range_or_each(seeds)]
    if not methods or not chosen:
        raise ValueError(f"nothing to compare: methods {list(methods)}, seeds {list(chosen)}")
    plan = [
        (method, lr, seed)
        for seed in chosen
        for method in (_method(name, given) for name, given in methods.items())
        for lr in method.rates or (None,)
    ]
    console = Console(stderr=True, quiet=not progress)
    names = TextColumn("{task.description}", markup=False)  # which may have brackets
    columns = (names, BarColumn(), TimeElapsedColumn())
    pulse, found = Pulse(console), []
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        shown = bar.add_task("", total=len(plan) * task.budget)
        for number, (method, lr, seed) in enumerate(plan):
            bar.update(shown, description=f"{method.name}, seed {seed}")

            def tell(done: int, before: int = number) -> None:
                bar.update(shown, completed=before * task.budget + done)
                pulse.beat(f"{before}/{len(plan)} runs, {done}/{task.budget} evaluations")

            try:
                found.append(_one_run(method, lr, task, seed, tell))
            except BaseException as error:  # KeyboardInterrupt too: nothing is lost
                error.result = Comparison(tuple(found))  # type: ignore[attr-defined]
                error.add_note(f"in a run of {method.name}, seed {seed}; .result has the rest")
                raise
    return Comparison(tuple(found))


def _range_or_each(seeds: Any) -> Iterable[Any]:
    if isinstance(seeds, Iterable):
        return seeds
    try:
        return range(operator.index(seeds))
    except TypeError:
        raise TypeError(f"seeds should be a number of them, or a list, got {seeds!r}") from None


def _method(name: str, given: Make | tuple[Make, Sequence[float]]) -> Method:
    if not (isinstance(name, str) and name and name.isprintable()):
        raise ValueError(f"the name of a method should be a text of one line, got {name!r}")
    make, rates = given if isinstance(given, tuple) else (given, ())
    if not callable(make):
        raise TypeError(f"{name}: should be a function of the parameters, got {make!r}")
    if not isinstance(rates, Iterable):
        raise TypeError(f"{name}: the rates should be a list of numbers, got {rates!r}")
    return Method(name, make, tuple(map(float, rates)))


def _workload(given: str | Mapping[str, Any] | Workload) -> Workload:
    if isinstance(given, Workload):
        return given
    if isinstance(given, str):
        if given not in EVERY:
            raise ValueError(f"no workload {given!r}: there are {', '.join(EVERY)}")
        return EVERY[given]()
    return workload_of(given)


def _one_run(
    method: Method, lr: float | None, task: Workload, seed: int, tell: Callable[[int], None]
) -> dict[str, Any]:
    training = Training(task, lambda run: method.stepper(run, lr), seed)
    run = {"method": method.name, "lr": lr, "default": lr is None or lr == method.rates[0]}
    if lr is None:  # as the optimizer has it; some have none
        optimizer = getattr(training.stepper, "optimizer", None)
        given = optimizer.param_groups[0].get("lr") if optimizer else None
        run["lr"] = 1.0 if given is None else float(given)
    for target in task.checkpoints:
        training.advance(target)
        training.record()
        tell(target)
        if training.status == "diverged":
            break
    return row_of(training, run)
