"""The pictures of the paper's experiment: the curves, and what STORM+ estimates on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from stormplus_bench import figures
from stormplus_bench.claims import AXES
from stormplus_bench.methods import ordered
from stormplus_bench.paper_tables import PANELS
from stormplus_bench.style import DASHED, DOTTED, SOLID, style_of

TOP = 1.5  # times the first loss; what is above would press the rest into one line


def curves(frame: pd.DataFrame) -> Figure:
    """Two rows of four panels: the paper's x axis above, the fair one below.

    Each method has one rate. Of several seeds the line is the mean, the band from the lowest to
    the highest.
    """
    drawn = Figure(figsize=(15, 7.6), layout="constrained")
    grid = drawn.subplots(2, len(PANELS))
    cut = False
    for row, (axis, axis_name) in zip(grid, AXES.items()):
        for panel, (metric, name) in zip(row, PANELS.items()):
            cut |= _panel(panel, frame, axis, metric)
            panel.set_title(name)
            panel.set_xlabel(axis_name)
    methods = ordered(frame["method"])
    rates = frame.groupby("method")["lr"].first()
    handles = [
        grid[0][0].plot([], [], label=f"{m} (lr {rates[m]:g})", **style_of(m).line())[0]
        for m in methods
    ]
    drawn.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(6, len(methods)),
        frameon=False,
        title=f"on the grey strip: losses above {TOP} times the first one" if cut else None,
    )
    return drawn


def _panel(panel: Any, frame: pd.DataFrame, axis: str, metric: str) -> bool:
    """Draw a panel; return whether something lies above it."""
    seen = frame[frame[axis] > 0]
    cut = False
    shown = seen[metric]
    if metric.endswith("loss"):
        panel.set_xscale("log")
        panel.set_yscale("log")
        top = TOP * float(frame[frame[axis] == 0][metric].median())
        cut = not bool((shown <= top).all())
        if cut:  # a line that leaves the panel would be lost, and one that comes back a riddle
            shown = shown.where(shown <= top, _strip(panel, shown, top))
    seen = seen.assign(shown=shown)
    for method in figures.back_to_front(frame["method"]):
        part = seen[seen["method"] == method].groupby(axis)["shown"].agg(["mean", "min", "max"])
        style = style_of(method)
        panel.plot(part.index, part["mean"], **style.line())
        if (part["max"] > part["min"]).any():
            panel.fill_between(
                part.index, part["min"], part["max"], color=style.colour, alpha=0.15, linewidth=0
            )
    figures.grid_lines(panel)
    return cut


def _strip(panel: Any, values: pd.Series, top: float) -> float:
    """Set the limits, paint the strip above `top`, and return where on it a point lies."""
    low = float(figures.finite(values).min(initial=top / TOP))
    pad = (top / low) ** 0.07
    panel.set_ylim(low / pad, top * pad)
    panel.axhspan(top, top * pad, color="0.9", zorder=0)
    if top / low < 10:  # a decade or less has too few powers of ten to read it by
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        panel.yaxis.set_major_formatter(ScalarFormatter())
        panel.yaxis.set_minor_formatter(NullFormatter())
    return float(top * pad**0.5)


_NORMS = {  # colour and dash of each quantity in the panels of one method
    "|g|, of the last mini-batch": ("grad_norm", "#8b6a2b", DOTTED),
    "|d|, the estimator": ("estimator_norm", "#d9480f", SOLID),
    "|grad f|": ("full_grad_norm", "#111111", SOLID),
    "|d - grad f|": ("error", "#d9480f", DASHED),
    "mini-batch's |g - grad f|": ("batch_error", "#8b6a2b", DASHED),
}


def estimator(tables: dict[str, pd.DataFrame], methods: Sequence[str]) -> Figure:
    """Gain, step size, ratio of errors and norms along runs of these two methods.

    `tables` as `course.estimators` gives them; one that is not there has not run yet.
    """
    drawn = Figure(figsize=(15, 7.6), layout="constrained")
    panels: dict[str, Any] = drawn.subplot_mosaic("AABBCC;DDDEEE")
    whole = {"gain": "gain $a_t$", "step_size": r"step size $lr\,\eta_t$"}
    whole["ratio"] = "error of d / error of a mini-batch's gradient (below 1: reduced)"
    for place, (name, title) in zip("ABC", whole.items()):
        for method, table in tables.items():
            panels[place].plot(table["epoch"], table[name], label=method, **style_of(method).line())
        _logarithmic(panels[place], title, empty=not tables)
    panels["C"].axhline(1, color="0.4", linewidth=1)
    for place, method in zip("DE", methods):
        if method in tables:
            for label, (name, colour, dash) in _NORMS.items():
                x, y = tables[method]["epoch"], tables[method][name]
                panels[place].plot(x, y, label=label, color=colour, linestyle=dash)
        _logarithmic(panels[place], f"{method}: norms", empty=method not in tables)
    return drawn


def _logarithmic(panel: Any, title: str, *, empty: bool) -> None:
    panel.set_title(title)
    panel.set_xlabel("epochs")
    figures.grid_lines(panel)
    if empty:
        panel.text(0.5, 0.5, "not run yet", ha="center", transform=panel.transAxes)
        return
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.legend(frameon=False)


def save(drawn: Figure, file: Path) -> None:
    """Without a date or a version in it: the same rows give the same file."""
    drawn.savefig(file, dpi=130, metadata={"Software": None})


def root(squares: pd.Series) -> pd.Series:
    """The root; nothing where the estimate of a square is negative."""
    return np.sqrt(squares.where(squares > 0))
