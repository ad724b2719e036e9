"""The paper's experiment, its start: what to run at each stage, and the page that it gives.

Three stages: a sweep of the learning rate, the same over more rates where the best one is at an
end of the range, and a long run of each method at its best rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure

from stormplus.files import write_whole
from stormplus_bench import figures, finals, markdown, paper_panels, paper_tables, rows
from stormplus_bench.claims import AXES, METRICS, NAMES, Reading
from stormplus_bench.course import neighbour
from stormplus_bench.methods import ordered

RATES = (0.001, 0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0, 3.16)
SOLVERS: dict[str, tuple[str, dict[str, list[str]]]] = {  # by label: benchopt's name and options
    "SGD momentum": ("sgd-momentum", {}),
    "AdaGrad": ("adagrad", {}),
    "Adam": ("adam", {}),
    "STORM": ("storm", {"norm": ["raw"]}),
    "STORM+": ("storm-plus", {"norm": ["raw"]}),
    "STORM+ mean": ("storm-plus", {"norm": ["mean"]}),
}
EXTENSIONS = 3  # how often a best rate at the end of its range may extend it
READINGS = [Reading(ours, "STORM", axis) for ours in ("STORM+", "STORM+ mean") for axis in AXES]


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
    for row in finals.tuned(part).itertuples():
        rates = sorted(set(part.loc[part["method"] == row.method, "lr"]))
        if not math.isfinite(row.loss) or len(rates) >= len(scale.rates) + EXTENSIONS:
            continue
        if row.lr == rates[0]:
            more[row.method] = [neighbour(rates[0], -1)]
        elif row.lr == rates[-1]:
            more[row.method] = [neighbour(rates[-1], +1)]
    return _config(scale.sweep_images, scale.sweep_evaluations, more) if more else None


def long_runs(scale: Scale, frame: pd.DataFrame) -> dict[str, Any]:
    """Every method at the best rate of its sweep."""
    best = finals.tuned(frame[frame["workload"] == scale.sweep_name]).set_index("method")["lr"]
    return _config(scale.images, scale.evaluations, {m: [float(best[m])] for m in SOLVERS})


def _config(images: int, evaluations: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "objective": [{"Training loss": {"seed": [0]}}],
        "dataset": [{"paper": {"images": [images], "budget": [evaluations]}}],
        "solver": [
            {SOLVERS[method][0]: {"lr": lrs, **SOLVERS[method][1]}} for method, lrs in rates.items()
        ],
    }


def report(frame: pd.DataFrame, scale: Scale) -> tuple[dict[str, Figure], str]:
    """The figures by name, and the text, as far as the rows go.

    Raises:
        ValueError: There is not even a run of the sweep.
    """
    sweep = frame[frame["workload"] == scale.sweep_name]
    if sweep.empty:
        raise ValueError(f"there is no run of the sweep {scale.sweep_name!r}")
    drawn = {"sweep": figures.sensitivity(sweep, scale.sweep_name)}
    best = finals.tuned(sweep).set_index("method")
    parts = [paper_tables.where(frame), "### The sweep\n", paper_tables.rates(sweep)]
    long = frame[frame["workload"] == scale.long_name]
    long = long[long["lr"] == long["method"].map(best["lr"])]  # not of an earlier, smaller sweep
    if not set(SOLVERS) <= set(long["method"]):
        parts.append(f"The long runs of {scale.long_name} are not complete.\n")
        return drawn, "\n".join(parts)
    long = paper_tables.with_epochs(long, scale.images)
    drawn["paper"] = paper_panels.curves(long)
    parts += ["### The long runs\n", _long_table(long), paper_tables.standings(long, "epoch")]
    parts += ["### The paper's claims at their end\n", paper_tables.judged(long, READINGS)]
    return drawn, "\n".join(parts)


def write(journal: Path, scale: Scale, folder: Path) -> list[Path]:
    """The files that could be made: the sweep alone is enough for a part of them."""
    try:
        drawn, text = report(rows.load(journal, on_cut="drop"), scale)
    except ValueError as error:
        raise ValueError(f"{journal}: {error}") from error
    written = []
    for name, picture in drawn.items():
        written.append(folder / f"{name}.png")
        paper_panels.save(picture, written[-1])
    return [*written, write_whole(folder / "paper.md", text)]


def _long_table(long: pd.DataFrame) -> str:
    lines = {}
    for method in ordered(long["method"]):
        end = long[long["method"] == method].sort_values("evaluations").iloc[-1]
        fine = end["status"] == "done"
        lines[method] = {
            "lr": f"{end['lr']:g}",
            "epochs": f"{end['epoch']:.2f}",
            "evaluations": f"{end['evaluations']:.0f}",
            **{NAMES[name]: f"{end[name]:.3f}" if fine else "diverged" for name in METRICS},
            "s": f"{end['seconds']:.0f}",
        }
    return markdown.table(pd.DataFrame.from_dict(lines, orient="index"), "method") + "\n"
