"""The paper's experiment in three stages: sweep, extend the sweep where needed, long runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus.bench.finals import tuned

RATES = (0.001, 0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0, 3.16)
SOLVERS: dict[str, tuple[str, dict[str, list[str]]]] = {  # by label: benchopt's name and options
    "SGD momentum": ("sgd-momentum", {}),
    "AdaGrad": ("adagrad", {}),
    "Adam": ("adam", {}),
    "STORM": ("storm", {"norm": ["raw"]}),
    "STORM+": ("storm-plus", {"norm": ["raw"]}),
    "STORM+ mean": ("storm-plus", {"norm": ["mean"]}),
}
BATCH = 100
EXTENSIONS = 3  # how often a best rate at the end of its range may extend it


@dataclass(frozen=True)
class Scale:
    """How much of the experiment to run. The network is ResNet34 at every scale.

    Attributes:
        sweep_images: Training images of the sweep.
        sweep_evaluations: Gradient evaluations of each run of the sweep.
        images: Training images of the long runs.
        evaluations: Gradient evaluations of each long run.
        rates: Learning rates of the sweep.
    """

    sweep_images: int
    sweep_evaluations: int
    images: int
    evaluations: int
    rates: tuple[float, ...] = RATES

    @property
    def sweep_name(self) -> str:
        return workload_name(self.sweep_images, self.sweep_evaluations)

    @property
    def long_name(self) -> str:
        return workload_name(self.images, self.evaluations)


SCALES = {
    "full": Scale(50_000, 5_000, 50_000, 100_000),  # 200 epochs, 100 of two gradients: a GPU
    "cpu": Scale(10_000, 300, 50_000, 1_000),  # two cores: an hour and a quarter, then half of one
    "smoke": Scale(400, 4, 400, 6, (0.01, 0.1)),  # a minute: does it run at all?
}


def workload_name(images: int, evaluations: int) -> str:
    """As the benchmark's `paper` data set calls itself."""
    return f"resnet34-cifar10 ({images} images, {evaluations} evaluations)"


def sweep(scale: Scale) -> dict[str, Any]:
    """The sweep as benchopt's configuration: one range for every method."""
    return _config(
        scale.sweep_images,
        scale.sweep_evaluations,
        {method: list(scale.rates) for method in SOLVERS},
    )


def extension(scale: Scale, frame: pd.DataFrame) -> dict[str, Any] | None:
    """One more rate for each method whose best is at an end of what it has run, if any."""
    more: dict[str, list[float]] = {}
    part = frame[frame["workload"] == scale.sweep_name]
    for row in tuned(part).itertuples():
        rates = sorted(set(part.loc[part["method"] == row.method, "lr"]))
        if not math.isfinite(row.loss) or len(rates) >= len(scale.rates) + EXTENSIONS:
            continue
        if row.lr == rates[0]:
            more[row.method] = [_neighbour(rates[0], -1)]
        elif row.lr == rates[-1]:
            more[row.method] = [_neighbour(rates[-1], +1)]
    return _config(scale.sweep_images, scale.sweep_evaluations, more) if more else None


def long_runs(scale: Scale, frame: pd.DataFrame) -> dict[str, Any]:
    """Every method at the best rate of its sweep."""
    best = tuned(frame[frame["workload"] == scale.sweep_name]).set_index("method")["lr"]
    return _config(scale.images, scale.evaluations, {m: [float(best[m])] for m in SOLVERS})


def _config(images: int, evaluations: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "objective": [{"Training loss": {"seed": [0]}}],
        "dataset": [{"paper": {"images": [images], "budget": [evaluations]}}],
        "solver": [
            {SOLVERS[method][0]: {"lr": lrs, **SOLVERS[method][1]}} for method, lrs in rates.items()
        ],
    }


def _neighbour(lr: float, step: int) -> float:
    """The next of ..., 0.0001, 0.000316, 0.001, ...: half a decade, three digits."""
    exponent = (round(2 * math.log10(lr)) + step) / 2
    return float(f"{10**exponent:.3g}")
