"""The panels that the figures are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from stormplus.bench import drawing, scores
from stormplus.bench.finals import SETTING, at
from stormplus.bench.style import style_of

POINTS = 80  # of a curve; more cannot be seen and make the page heavy


def panel_grid(frame: pd.DataFrame) -> tuple[Figure, list[tuple[Any, tuple[str, pd.DataFrame]]]]:
    """A figure with an empty panel for each workload, and the workload's rows."""
    parts = list(frame.groupby("workload", sort=True))
    rows, columns = drawing.shape(len(parts))
    size = (1 + 3.5 * columns, 1.4 + 2.5 * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(parts) :]:
        axis.set_visible(False)
    return figure, list(zip(axes, parts))


def curves_of(frame: pd.DataFrame, column: str, *, best_lr: bool) -> pd.DataFrame:
    """The curves over seeds of each method at its default or its best lr, and its `loss`."""
    settings = at(frame, best_lr=best_lr)[[*SETTING, "loss"]]
    return scores.curves(frame, column).merge(settings, on=SETTING)


def curve_limits(tables: Sequence[pd.DataFrame], start: float) -> tuple[float, float]:
    """The lowest median, and the highest but for what rises far above the start."""
    seen = drawing.finite(pd.concat(tables)["median"])
    top = seen.max(initial=-np.inf)
    return seen.min(initial=np.inf), min(top, 1.5 * start) if start > 0 else top


def why_empty(frame: pd.DataFrame, table: pd.DataFrame, *, best_lr: bool) -> str:
    """What to say in a panel of these curves of the frame if there is nothing to draw."""
    if len(table):
        return "every run diverged"
    if len(at(frame, best_lr=best_lr)):
        return "not measured"
    return "no method ran several lr" if best_lr else "no run at the default lr"


def curves_panel(
    axis: Any, table: pd.DataFrame, limits: tuple[float, float], title: str, empty: str
) -> None:
    """Median lines with bands, and a cross where most of a method's runs have diverged."""
    drawing.level_lines(axis, *(limits if len(table) else (np.inf, -np.inf)), empty)
    top = axis.get_ylim()[1]
    for method in drawing.front_last(table["method"]):
        line = table[table["method"] == method]
        known = line[np.isfinite(line["median"])]
        diverged = len(known) > 0 and np.isinf(line["loss"].iloc[0])
        if len(known) > POINTS:
            known = known.iloc[
                np.unique(np.linspace(0, len(known) - 1, POINTS).round().astype(int))
            ]
        x, style = known["evaluations"].to_numpy(), style_of(method)
        (drawn,) = axis.plot(x, known["median"], markevery=(0.05, 0.2), **style.line())
        drawing.tag(drawn, method)
        # A band without an upper end leaves the picture; inf itself cannot be drawn.
        ceiling = known["high"].replace(np.inf, 1e3 * max(abs(top), 1e-300))
        band = axis.fill_between(
            x, known["low"], ceiling, color=style.colour, alpha=0.13, linewidth=0
        )
        drawing.tag(band, method, 1)
        if diverged:
            end = min(known["median"].iloc[-1], top)
            (cross,) = axis.plot(x[-1:], [end], "x", color=style.colour, ms=9, mew=2, clip_on=False)
            drawing.tag(cross, method, 2)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(drawing.EVALUATIONS, fontsize=9)
    drawing.grid_lines(axis)


def sensitivity_panel(axis: Any, frame: pd.DataFrame, column: str, title: str) -> None:
    """Final values against lr; what diverged lies on a shelf above the axis."""
    table = scores.final(frame)
    low, high = ("low", "high") if column == "loss" else ("grad_low", "grad_high")
    source = "train_loss" if column == "loss" else "grad_norm"
    first = frame.dropna(subset=[source]).sort_values("evaluations").groupby(list(SETTING))
    start = first[source].first().replace(np.inf, np.nan).median()
    seen = drawing.finite(table[column])
    limit = np.fmin(seen.max(initial=-np.inf), start if column == "loss" else 10 * start)
    empty = "every run diverged" if np.isinf(table["loss"]).all() else "not measured"
    drawing.level_lines(axis, seen.min(initial=np.inf), limit, empty)
    bottom, top = axis.get_ylim()
    log = axis.get_yscale() == "log"
    shelf = top * (top / bottom) ** 0.06 if log else top + 0.06 * (top - bottom)
    roof = top * (top / bottom) ** 0.12 if log else top + 0.12 * (top - bottom)
    axis.set_ylim(bottom, roof)
    axis.axhspan(top, roof, color="0.93", zorder=0)
    axis.text(0.01, 0.995, "diverged or above", transform=axis.transAxes, va="top", fontsize=7.5)
    for method in drawing.front_last(table["method"]):
        line = table[(table["method"] == method) & table[column].notna()].sort_values("lr")
        style = style_of(method)
        y = line[column].where(line[column] <= top, shelf)
        (drawn,) = axis.plot(line["lr"], y, **style.line())
        drawing.tag(drawn, method)
        inside = (line[column] <= top).to_numpy()
        bars = axis.vlines(
            line["lr"][inside],
            line[low][inside],
            line[high].clip(upper=top)[inside],
            color=style.colour,
            alpha=0.5,
            linewidth=1,
        )
        drawing.tag(bars, method, 1)
        own = line["default"].to_numpy()
        (ring,) = axis.plot(
            line["lr"][own], y[own], "o", ms=11, mfc="none", mec=style.colour, mew=1.2
        )
        drawing.tag(ring, method, 2)
    axis.set_xscale("log")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("learning rate", fontsize=9)
    axis.set_title(title, fontsize=10)
    drawing.grid_lines(axis)
