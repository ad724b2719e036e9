"""The four panels of the paper's figure, against epochs and against gradient evaluations."""

from __future__ import annotations

from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from stormplus.bench import drawing
from stormplus.bench.style import ordered, style_of

PANELS = {
    "train_loss": "training loss",
    "valid_loss": "test loss",
    "train_accuracy": "training accuracy",
    "valid_accuracy": "test accuracy",
}
AXES = {"epoch": "epochs", "evaluations": "gradient evaluations"}
TOP = 1.5  # times the first loss; what is above would press the rest into one line


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
    drawing.grid_lines(panel)
    if not metric.endswith("loss"):
        return False
    panel.set_xscale("log")
    panel.set_yscale("log")
    values = drawing.finite(seen[metric])
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
