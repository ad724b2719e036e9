"""The figures for print: pure functions of the frame that `rows.load` returns."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stormplus_bench import finals, scores
from stormplus_bench.methods import METHODS, OURS, ordered
from stormplus_bench.profiles import curves
from stormplus_bench.style import WIDTH, style_of
from stormplus_bench.tables import percent

MAX_RANGE = 1e20  # of a logarithmic axis
MAX_LETTERS = 44  # of a name


def curves_grid(frame: pd.DataFrame, ends: pd.DataFrame) -> Figure:
    """Draw the training loss against gradient evaluations, one panel per workload.

    `ends` says at which lr each method is drawn: `finals.defaults(frame)` or `finals.tuned(frame)`.
    """
    table = curves(frame).merge(ends[finals.SETTING], on=finals.SETTING)
    initial = finals.initial_loss(frame)
    columns = min(2, len(initial))
    lines = -(-len(initial) // columns)
    height = lines * (2.5 if len(initial) > 1 else 3.6) + 1
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, (name, start) in zip(axes, initial.items()):
        part = table[table["workload"] == name]
        top = _limits(axis, part["median"], 1.5 * start if start > 0 else np.inf)
        for method in ordered(part["method"])[::-1]:  # the library's methods on top
            _curve(axis, part[part["method"] == method], method, top)
        axis.set_title(_name(name), fontsize=9)
        axis.set_xlabel("gradient evaluations", fontsize=8)
        axis.grid(True, which="major", color="0.88", linewidth=0.7)
        axis.tick_params(which="both", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(initial) :]:
        axis.set_visible(False)
    figure.supylabel("training loss", fontsize=9)
    seeds = "median, lowest and highest over seeds" if frame["seed"].nunique() > 1 else "one seed"
    lr = "default" if ends["default"].all() else "best"
    _legend(figure, table["method"], f"each at its {lr} lr\n{seeds}; crosses: diverged")
    return figure


def _curve(axis: Any, line: pd.DataFrame, method: str, top: float) -> None:
    known = line[np.isfinite(line["median"])]
    if known.empty:
        return
    diverged = len(known) < len(line)
    style, x = style_of(method), known["evaluations"]
    # Far outside the panel matplotlib cannot place markers.
    low, median, high = (known[name].clip(upper=1e3 * top) for name in ("low", "median", "high"))
    axis.plot(x, median, markevery=(0.05, 0.2), label=method, **style.line())
    axis.fill_between(x, low, high, color=style.colour, alpha=0.13, linewidth=0)
    if diverged:
        end = min(median.iloc[-1], top)
        axis.plot(x.iloc[-1], end, "x", color=style.colour, ms=9, mew=2, clip_on=False)


def _limits(axis: Any, values: pd.Series, highest: float) -> float:
    """Set the limits, on a logarithmic scale if the values spread; return the upper one."""
    seen = values[np.isfinite(values)]
    if seen.empty:
        text = "every run diverged" if len(values) else "no run"
        axis.text(0.5, 0.5, text, ha="center", transform=axis.transAxes)
        return 1.0
    low, high = seen.min(), max(seen.min(), min(seen.max(), highest))
    if low > 0 and high / low > 8:
        low = max(low, high / MAX_RANGE)
        axis.set_yscale("log")
        pad = (high / low) ** 0.05
        low, high = low / pad, high * pad
    else:
        pad = 0.05 * (high - low) or 0.5 * abs(low) or 0.5
        low, high = low - pad, high + pad
    axis.set_ylim(low, high)
    return float(high)


def _legend(figure: Figure, methods: Iterable[str], note: str) -> None:
    names = ordered(methods)
    handles = [Line2D([], [], **style_of(name).line()) for name in names]  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "handlelength": 3.4}
    entries = 4 if max(map(len, names), default=0) <= 22 else 2
    shown = [_name(name) for name in names]
    sizes |= {"ncols": entries, "frameon": False}
    figure.legend(handles, shown, loc="outside lower center", title=note, **sizes)


def gap_at_defaults(frame: pd.DataFrame) -> Figure:
    """Draw the gap at defaults in per cent, methods by workloads, the smallest mean on top."""
    grid = scores.gap_map(scores.gap(frame))
    title = (
        "Gap at defaults, % (lower is better): the share of the achievable\n"
        "loss reduction that is missed without tuning"
    )
    return heat_maps({title: grid}, percent, lambda gap: np.sqrt(gap / 100), "Oranges")


def heat_maps(
    grids: dict[str, pd.DataFrame],
    text: Callable[[float], str],
    strength: Callable[[Any], Any],
    colours: str,
) -> Figure:
    """Draw tables of numbers as coloured cells, one below the other.

    Args:
        grids: Methods by workloads, by title.
        text: What a cell says.
        strength: How strongly a cell is coloured, from 0 to 1; nan for no colour.
        colours: The name of a colour map of matplotlib.
    """
    heights = [0.24 * len(grid) for grid in grids.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.6 * len(grids)), layout="constrained")
    axes = figure.subplots(len(grids), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, grid) in zip(axes, grids.items()):
        values = grid.to_numpy(dtype=float)
        shade = np.clip(strength(values), 0.0, 1.0)
        axis.pcolormesh(shade, cmap=colours, vmin=0, vmax=1.15, edgecolor="white", linewidth=1.2)
        for (i, j), value in np.ndenumerate(values):
            ink = "white" if shade[i, j] > 0.75 else "black"
            axis.text(j + 0.5, i + 0.5, text(value), ha="center", va="center", fontsize=7.5, c=ink)
        axis.set_xticks(np.arange(values.shape[1]) + 0.5, map(_name, grid.columns))
        for label in axis.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")
        axis.set_yticks(np.arange(len(grid)) + 0.5, map(_name, grid.index))
        for label, method in zip(axis.get_yticklabels(), grid.index):
            label.set_weight("bold" if method in OURS or method not in METHODS else "normal")
        axis.invert_yaxis()
        axis.tick_params(length=0, labelsize=8, pad=2)
        axis.spines[:].set_visible(False)
        axis.set_title(title, loc="left", fontsize=9)
    return figure


def _name(text: str) -> str:
    """Return a name as figures show it: cut to length, and a dollar starts no formula."""
    text = text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 1] + "…"
    return text.replace("$", r"\$")
