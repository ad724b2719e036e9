"""The four panels of the paper's figure, against epochs and against gradient evaluations."""

from __future__ import annotations

from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure

from stormplus.bench import drawing
from stormplus.bench.style import ordered, style_of

PANELS = {
    "train_loss": "training loss",
    "valid_loss": "test loss",
    "train_accuracy": "training accuracy",
    "valid_accuracy": "test accuracy",
}
AXES = {"epoch": "epochs", "evaluations": "gradient evaluations"}


def figure(frame: pd.DataFrame, rates: dict[str, float]) -> Figure:
    """Two rows of four panels: the paper's x axis above, the fair one below."""
    drawn = Figure(figsize=(15, 7.4), layout="constrained")
    grid = drawn.subplots(2, len(PANELS))
    for row, (axis, axis_name) in zip(grid, AXES.items()):
        for panel, (metric, name) in zip(row, PANELS.items()):
            _panel(panel, frame, axis, metric)
            panel.set_title(f"{name}")
            panel.set_xlabel(axis_name)
    methods = ordered(frame["method"])
    handles = [
        grid[0][0].plot([], [], label=f"{m} (lr {rates[m]:g})", **style_of(m).line())[0]
        for m in methods
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(methods), frameon=False)
    return drawn


def _panel(panel: Any, frame: pd.DataFrame, axis: str, metric: str) -> None:
    for method in ordered(frame["method"]):
        part = frame[(frame["method"] == method) & (frame[axis] > 0)].sort_values(axis)
        panel.plot(part[axis], part[metric], **style_of(method).line())
    if metric.endswith("loss"):
        panel.set_xscale("log")
        panel.set_yscale("log")
    drawing.grid_lines(panel)
