"""The paper's experiment: what to run at each stage, and the figure, tables and claims it gives.

Three stages: a sweep of the learning rate, the same over more rates where the best one is at an
end of the range, and a long run of each method at its best rate.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from stormplus_bench import figures, finals, markdown, rows
from stormplus_bench.claims import METRICS, claims
from stormplus_bench.course import neighbour
from stormplus_bench.methods import ordered
from stormplus_bench.style import style_of

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
PANELS = {
    "train_loss": "training loss",
    "valid_loss": "test loss",
    "train_accuracy": "training accuracy",
    "valid_accuracy": "test accuracy",
}
AXES = {"epoch": "epochs", "evaluations": "gradient evaluations"}
TOP = 1.5  # times the first loss; what is above would press the rest into one line
WIDE = 1e4  # from here on a loss is written with an exponent


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
    parts = [_where(frame), "### The sweep\n", _sweep_table(sweep)]
    long = frame[frame["workload"] == scale.long_name]
    long = long[long["lr"] == long["method"].map(best["lr"])]  # not of an earlier, smaller sweep
    if not set(SOLVERS) <= set(long["method"]):
        parts.append(f"The long runs of {scale.long_name} are not complete.\n")
        return drawn, "\n".join(parts)
    long = with_epochs(long, scale.images)
    drawn["paper"] = figure(long, best["lr"].to_dict())
    parts += ["### The long runs\n", _long_table(long)]
    for axis, name in AXES.items():
        parts.append(f"### The paper's claims, at equal {name}\n")
        parts += [_claims_table(long, axis, ours) for ours in ("STORM+", "STORM+ mean")]
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
        save(picture, written[-1])
    written.append(folder / "paper.md")
    written[-1].write_text(text)
    return written


def save(drawn: Figure, file: Path) -> None:
    """Without a date or a version in it: the same rows give the same file."""
    drawn.savefig(file, dpi=130, metadata={"Software": None})


def _where(frame: pd.DataFrame) -> str:
    versions = json.loads(frame["versions"].iloc[-1])
    named = ", ".join(f"{name} {versions.get(name, '?')}" for name in ("stormplus", "torch"))
    machines = "; ".join(sorted(frame["machine"].unique()))
    return f"Machine: {machines}; {named}; seed 0, one run each.\n"


def _sweep_table(sweep: pd.DataFrame) -> str:
    ends = finals.per_rate(sweep).pivot(index="method", columns="lr", values="loss")
    cells = ends.apply(lambda line: line.map(partial(_cell, lowest=line.min())), axis=1)
    cells = cells.loc[ordered(cells.index)].rename(columns="{:g}".format)
    ends_of_range = [row.method for row in finals.tuned(sweep).itertuples() if row.at_end]
    note = "Training loss at the end of each run; the best rate is bold."
    if ends_of_range:
        note += (
            f" At an end of its range, so a wider one might do better: {', '.join(ends_of_range)}."
        )
    return f"{markdown.table(cells, 'method')}\n\n{note}\n"


def _cell(value: float, lowest: float) -> str:
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "diverged"
    text = f"{value:.3f}" if value < WIDE else f"{value:.1e}"
    return f"**{text}**" if value == lowest else text


def _long_table(long: pd.DataFrame) -> str:
    lines = {}
    for method in ordered(long["method"]):
        end = long[long["method"] == method].sort_values("evaluations").iloc[-1]
        fine = end["status"] == "done"
        lines[method] = {
            "lr": f"{end['lr']:g}",
            "epochs": f"{end['epoch']:.2f}",
            "evaluations": f"{end['evaluations']:.0f}",
            **{PANELS[name]: f"{end[name]:.3f}" if fine else "diverged" for name in METRICS},
            "s": f"{end['seconds']:.0f}",
        }
    return markdown.table(pd.DataFrame.from_dict(lines, orient="index"), "method") + "\n"


def _claims_table(long: pd.DataFrame, axis: str, ours: str) -> str:
    found = claims(long, axis, ours)
    table = pd.DataFrame(
        {"here": [c.verdict for c in found], "numbers": [c.numbers for c in found]},
        index=[c.text for c in found],
    )
    return markdown.table(table, f"the paper says (its STORM+: {ours})") + "\n"


def with_epochs(frame: pd.DataFrame, images: int) -> pd.DataFrame:
    """Add the column `epoch`: passes over the data, as in the paper's figure."""
    return frame.assign(epoch=frame["samples"] * BATCH / images)


def figure(frame: pd.DataFrame, rates: dict[str, float]) -> Figure:
    """Two rows of four panels: the paper's x axis above, the fair one below."""
    drawn = Figure(figsize=(15, 7.4), layout="constrained")
    grid = drawn.subplots(2, len(PANELS))
    cut = False
    for row, (axis, axis_name) in zip(grid, AXES.items()):
        for panel, (metric, name) in zip(row, PANELS.items()):
            cut |= _panel(panel, frame, axis, metric)
            panel.set_title(name)
            panel.set_xlabel(axis_name)
    methods = ordered(frame["method"])
    handles = [
        grid[0][0].plot([], [], label=f"{m} (lr {rates[m]:g})", **style_of(m).line())[0]
        for m in methods
    ]
    drawn.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(methods),
        frameon=False,
        title=f"losses above {TOP} times the first one are not shown" if cut else None,
    )
    return drawn


def _panel(panel: Any, frame: pd.DataFrame, axis: str, metric: str) -> bool:
    """Draw a panel; return whether something lies above it."""
    seen = frame[frame[axis] > 0]
    for method in ordered(frame["method"]):
        part = seen[seen["method"] == method].sort_values(axis)
        panel.plot(part[axis], part[metric], **style_of(method).line())
    figures.grid_lines(panel)
    if not metric.endswith("loss"):
        return False
    panel.set_xscale("log")
    panel.set_yscale("log")
    values = figures.finite(seen[metric])
    top = TOP * float(frame[frame[axis] == 0][metric].median())
    if not (values > top).any():
        return False
    low = values.min()
    panel.set_ylim(low / (top / low) ** 0.05, top)
    if top / low < 10:  # a decade or less has too few powers of ten to read it by
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_formatter(NullFormatter())
    return True
