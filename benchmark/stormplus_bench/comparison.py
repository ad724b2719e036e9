"""`compare`: optimizers side by side on one workload, from Python."""

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from rich.console import Console

from stormplus_bench import finals, rows
from stormplus_bench.cli import did_you_mean
from stormplus_bench.interrupts import progress as show_progress
from stormplus_bench.methods import ordered
from stormplus_bench.own import Make, Method, method_of, workload_of
from stormplus_bench.train.catalogue import EVERY
from stormplus_bench.train.training import Training, row_of
from stormplus_bench.train.workload import Workload

COLUMNS = ["loss", "low", "high", "valid_loss", "valid_accuracy", "lr", "seeds", "diverged"]
COLUMNS += ["seconds", "state_mb"]
TITLES = {
    "loss": "training loss",
    "low": "lowest",
    "high": "highest",
    "valid_loss": "validation loss",
    "valid_accuracy": "validation accuracy",
    "state_mb": "state, MB",
}
Makes = Make | tuple[Make, Sequence[float]]


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`; its repr is the table, in a notebook with the figure."""

    rows: tuple[dict[str, Any], ...]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per measurement of each run, as from `stormplus_bench.rows.load`."""
        return rows.frame_of(rows.finite(list(self.rows)))

    @property
    def table(self) -> pd.DataFrame:
        """One line per method at its best rate, the lowest final training loss first."""
        ends = finals.tuned(self.frame).set_index("method").loc[ordered(self.frame["method"])]
        table = ends.sort_values("loss", kind="stable")[COLUMNS].rename(columns=TITLES)
        return table.dropna(axis="columns", how="all")

    def plot(self) -> Any:
        """Return the curves as a matplotlib figure, each method at the rate in the table."""
        from stormplus_bench.figures import curves_grid

        return curves_grid(self.frame, finals.tuned(self.frame))

    def save(self, journal: str | Path) -> Path:
        """Append the rows to a journal, which `stormplus report` merges with others."""
        path = Path(journal)
        path.parent.mkdir(parents=True, exist_ok=True)
        for row in self.rows:
            rows.append(path, row)
        return path

    def __repr__(self) -> str:
        return str(self.table.to_string(float_format="{:.4g}".format)) if self.rows else "no runs"

    def _repr_html_(self) -> str:
        drawn = io.BytesIO()
        self.plot().savefig(drawn, format="png", dpi=110)
        picture = base64.b64encode(drawn.getvalue()).decode()
        table = self.table.to_html(float_format="{:.4g}".format)
        return f'{table}<img alt="Training loss" src="data:image/png;base64,{picture}">'


def compare(
    methods: Mapping[str, Makes] | Sequence[type],
    workload: str | Mapping[str, Any] | Workload = "mlp-digits",
    *,
    seeds: int | Iterable[int] = 1,
    progress: bool = True,
) -> Comparison:
    """Train a model with several optimizers at equal numbers of gradient evaluations.

    Every method starts at the same point and sees the same batches. A method with two gradients
    per step takes half as many steps.

    Args:
        methods: By name, a function or class that makes the optimizer from the parameters; or a
            list of classes. For several learning rates, a pair (make, rates), and then
            `make(parameters, lr)` is called; the first rate is the default.
        workload: A dict with model, loss, data, budget and other arguments of
            `stormplus_bench.train.workload.Network`; or the name of a workload of the benchmark;
            by default "mlp-digits".
        seeds: How many, or which.
        progress: Whether to show progress on the standard error stream.

    Returns:
        The table and the figure, see `Comparison`. If a run raises, the exception's attribute
        `result` has the runs before it.
    """
    task = _workload(workload)
    chosen = [int(seed) for seed in (seeds if isinstance(seeds, Iterable) else range(seeds))]
    known = _methods(methods)
    runs = [(m, lr, seed) for seed in chosen for m in known for lr in m.rates or (None,)]
    if not runs:
        raise ValueError(f"nothing to compare: methods {methods}, seeds {chosen}")
    console, found = Console(stderr=True, quiet=not progress), []
    with show_progress(console, len(runs) * task.budget, transient=True) as show:
        for number, (method, lr, seed) in enumerate(runs):
            text = f"{number + 1}/{len(runs)}: {method.name}, seed {seed}"

            def notify(done: int, text: str = text, before: int = number * task.budget) -> None:
                show(text, before + done)

            try:
                found.append(_one_run(method, lr, task, seed, notify))
            except BaseException as error:  # KeyboardInterrupt, too
                error.result = Comparison(tuple(found))  # type: ignore[attr-defined]
                error.add_note(f"in a run of {method.name}, seed {seed}; .result has the others")
                raise
    return Comparison(tuple(found))


def _methods(methods: Mapping[str, Makes] | Sequence[type]) -> list[Method]:
    if not isinstance(methods, Mapping):
        methods = {made.__name__: made for made in methods}
    pairs = {name: made if isinstance(made, tuple) else (made,) for name, made in methods.items()}
    return [method_of(name, *pair) for name, pair in pairs.items()]


def _workload(given: str | Mapping[str, Any] | Workload) -> Workload:
    if isinstance(given, Workload):
        return given
    if not isinstance(given, str):
        return workload_of(given)
    if given not in EVERY:
        raise ValueError(
            f"no workload {given!r}{did_you_mean(given, EVERY)} Choose from {', '.join(EVERY)}"
        )
    return EVERY[given]()


def _one_run(
    method: Method, lr: float | None, task: Workload, seed: int, notify: Callable[[int], None]
) -> dict[str, Any]:
    training = Training(task, lambda run: method.stepper(run, lr), seed)
    run = {"method": method.name, "lr": lr, "default": lr is None or lr == method.rates[0]}
    if lr is None:  # the optimizer's default; 1 if it has none
        optimizer = getattr(training.stepper, "optimizer", None)
        given = optimizer.param_groups[0].get("lr") if optimizer else None
        run["lr"] = 1.0 if given is None else float(given)
    return row_of(training.finish(notify), run)
