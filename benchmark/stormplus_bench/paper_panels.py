"""The pictures of the paper's experiment: the curves, and what STORM+ estimates on the way."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure

from stormplus.files import write_whole
from stormplus_bench import figures
from stormplus_bench.claims import AXES, NAMES
from stormplus_bench.methods import NO_RATE, ordered
from stormplus_bench.style import DASHED, DOTTED, SOLID, style_of

TOP = 1.5  # times the first loss; what is above would press the rest into one line


def curves(frame: pd.DataFrame) -> Figure:
    """Four rows of two panels: the paper's x axis on the left, the fair one on the right.

    Each method has one rate. Of several seeds the line is the mean, the band from the lowest to
    the highest.
    """
    methods = ordered(frame["method"])
    rates = frame.groupby("method")["lr"].first()
    labels = {
        method: method if method in NO_RATE else f"{method} (lr {rates[method]:g})"
        for method in methods
    }
    tops = _tops(frame)
    words = f"on the grey strip: losses above {TOP} times the first one" if tops else ""
    places = [(metric, axis) for metric in NAMES for axis in AXES]
    drawn, panels = figures.canvas(len(places), 1.9, methods, words, labels=labels)
    for panel, (metric, axis) in zip(panels, places):
        _panel(panel, frame, axis, metric, tops.get(metric))
        panel.set_title(NAMES[metric], fontsize=9)
        panel.set_xlabel(AXES[axis], fontsize=8)
    return drawn


def _tops(frame: pd.DataFrame) -> dict[str, float]:
    """Where a loss is too high for its panels, for the losses that come there."""
    started = frame["evaluations"] > 0
    tops = {m: TOP * float(frame[~started][m].median()) for m in NAMES if m.endswith("loss")}
    return {m: top for m, top in tops.items() if not bool((frame[started][m] <= top).all())}


def _panel(panel: Any, frame: pd.DataFrame, axis: str, metric: str, top: float | None) -> None:
    """Draw a panel; what is above `top`, if that is given, lies on a strip."""
    seen = frame[frame[axis] > 0]
    shown = seen[metric]
    log = metric.endswith("loss")
    if log:
        panel.set_xscale("log")
        panel.set_yscale("log")
    if top is not None:  # a line that leaves the panel would be lost, and one that returns a riddle
        shown = shown.where(shown <= top, _strip(panel, shown, top))
    seen = seen.assign(shown=shown)
    for method in figures.back_to_front(frame["method"]):
        part = seen[seen["method"] == method].groupby(axis)["shown"].agg(["mean", "min", "max"])
        style = style_of(method)
        panel.plot(part.index, part["mean"], **style.line())
        if (part["max"] > part["min"]).any():
            panel.fill_between(
                part.index, part["min"], part["max"], color=style.colour, alpha=0.13, linewidth=0
            )
    figures.grid_lines(panel)
    if log:
        figures.log_ticks(panel.xaxis)
        figures.log_ticks(panel.yaxis)


def _strip(panel: Any, values: pd.Series, top: float) -> float:
    """Set the limits, paint the strip above `top`, and return where on it a point lies."""
    low = float(figures.finite(values).min(initial=top / TOP))
    pad = (top / low) ** 0.07
    panel.set_ylim(low / pad, top * pad)
    panel.axhspan(top, top * pad, color="0.93", zorder=0)
    return float(top * pad**0.5)


_OF_A_BATCH = "#868e96"  # grey: no hue of the methods that are drawn here
_NORMS = {  # what it is, its colour (None: the method's) and its dash
    "|g|, of the last mini-batch": ("grad_norm", _OF_A_BATCH, DOTTED),
    "|d|, the estimator": ("estimator_norm", None, SOLID),
    "|grad f|": ("full_grad_norm", "#111111", SOLID),
    "|d - grad f|": ("error", None, DASHED),
    "mini-batch's |g - grad f|": ("batch_error", _OF_A_BATCH, DASHED),
}


def estimator(tables: dict[str, pd.DataFrame], methods: Sequence[str]) -> Figure:
    """Gain, step size, norms and ratio of errors along runs of these two methods.

    `tables` as `course.estimators` gives them; one that is not there has not run yet.
    """
    drawn, panels = figures.canvas(6, 2.1, methods)
    whole = {"gain": "gain $a_t$", "step_size": r"step size $lr\,\eta_t$"}
    whole["ratio"] = "error of d / error of g (below 1: reduced)"
    for panel, (name, title) in zip((panels[0], panels[1], panels[4]), whole.items()):
        for method, table in tables.items():
            panel.plot(table["epoch"], table[name], **style_of(method).line())
        _logarithmic(panel, title, empty=not tables)
    panels[4].axhline(1, color="0.4", linewidth=1)
    for panel, method in zip(panels[2:4], methods):
        if method in tables:
            for name, colour, dash in _NORMS.values():
                x, y = tables[method]["epoch"], tables[method][name]
                panel.plot(x, y, color=colour or style_of(method).colour, linestyle=dash)
        _logarithmic(panel, f"{method}: norms", empty=method not in tables)
    _explained(panels[5], methods[0])
    return drawn


def _explained(panel: Any, method: str) -> None:
    """What the lines of the norms are, in the place of a panel; the estimator's as `method`'s."""
    for label, (_, colour, dash) in _NORMS.items():
        panel.plot([], [], color=colour or style_of(method).colour, linestyle=dash, label=label)
    panel.axis("off")
    panel.legend(
        loc="center",
        fontsize=8,
        title="norms, of d in the colour of its method",
        title_fontsize=8,
        frameon=False,
        handlelength=3.4,
    )


def _logarithmic(panel: Any, title: str, *, empty: bool) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("epochs", fontsize=8)
    figures.grid_lines(panel)
    if empty:
        panel.text(0.5, 0.5, "not run yet", ha="center", transform=panel.transAxes)
        return
    panel.set_xscale("log")
    panel.set_yscale("log")
    figures.log_ticks(panel.xaxis)
    figures.log_ticks(panel.yaxis)


def save(drawn: Figure, file: Path) -> None:
    """Without a date or a version in it: the same rows give the same file."""
    content = io.BytesIO()
    drawn.savefig(content, format="png", dpi=130, metadata={"Software": None})
    write_whole(file, content.getvalue())


def root(squares: pd.Series) -> pd.Series:
    """The root; nothing where the estimate of a square is negative."""
    return np.sqrt(squares.where(squares > 0))
