"""The benchmark's figures: pure functions of the frame that `rows.load` gives.

First the figures, then the panels they are made of, then what all of them share. A figure is as
wide as the text of a page, so that its letters can be read there. Its parts are placed by hand:
matplotlib's layout engine would take half of the time of a report.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from stormplus.theory.palette import WIDTH
from stormplus_bench import finals, scores
from stormplus_bench.finals import ONE_LR, SETTING, any_left_out
from stormplus_bench.methods import METHODS, OURS, ordered
from stormplus_bench.profiles import CLASSICS, TARGET_AT
from stormplus_bench.profiles import curves as curves_over_seeds
from stormplus_bench.profiles import performance_profile as profile_of
from stormplus_bench.style import style_of

EVALUATIONS = "gradient evaluations"
MOST = 80  # measurements of a curve that are drawn; more cannot be seen and make the page heavy
NAMES = {"train_loss": "training loss", "loss": "final training loss"}
NAMES |= {"valid_loss": "validation loss", "grad_norm": "final gradient norm"}
COLUMNS = 2
# Inches that the parts of a figure take.
LEFT, RIGHT, ABOVE, BELOW, BETWEEN = 0.7, 0.12, 0.3, 0.46, 0.62
# Of a legend: a line, a piece of line, a letter in its widest and in its usual width.
LINE, SAMPLE, LETTER, SMALL = 0.165, 0.62, 0.072, 0.062
MOST_DECADES = 1e20  # of a logarithmic axis
LONGEST = 44  # letters of a name that a figure has room for


def curves(
    frame: pd.DataFrame,
    workload: str,
    column: str = "train_loss",
    methods: Sequence[str] | None = None,
) -> Figure:
    """A workload's curves, at the defaults (left) and at each method's best lr (right)."""
    part = chosen(frame, workload, methods)
    above = ABOVE + LINE * (1 + any_left_out(part))  # a title has two lines, or three
    figure, axes = canvas(2, 3.1, part["method"], _bands(part), above=above)
    tables = [
        chosen(curves_of(frame, column, best_lr), workload, methods) for best_lr in (False, True)
    ]
    limits = curve_limits(tables, finals.initial_loss(frame)[workload])
    for axis, table, best_lr in zip(axes, tables, (False, True)):
        title = f"{workload}\n{_each(part, best_lr=best_lr)}"
        curves_panel(axis, table, limits, title, why_empty(part, table, best_lr=best_lr))
    axes[0].set_ylabel(NAMES.get(column, column), fontsize=9)
    return figure


def curves_grid(
    frame: pd.DataFrame,
    *,
    best_lr: bool = False,
    column: str = "train_loss",
    methods: Sequence[str] | None = None,
    workloads: Sequence[str] | None = None,
    each: str | None = None,
) -> Figure:
    """The curves of several workloads, of all if None, one small panel each.

    `each` says at which lr a method is drawn, if it is neither its default nor its best.
    """
    names = sorted(frame["workload"].unique()) if workloads is None else workloads
    every = curves_of(frame, column, best_lr)
    tables = {name: chosen(every, name, methods) for name in names}
    drawn = [method for table in tables.values() for method in table["method"].unique()]
    words = f"{each or _each(frame, best_lr=best_lr)}; {_bands(frame)}".replace("\n", " ")
    figure, axes = canvas(len(names), 1.9 if len(names) > 1 else 3.1, drawn, words)
    for axis, (name, table) in zip(axes, tables.items()):
        limits = curve_limits([table], finals.initial_loss(frame)[name])
        empty = why_empty(chosen(frame, name, methods), table, best_lr=best_lr)
        curves_panel(axis, table, limits, name, empty)
    side_label(figure, axes, NAMES.get(column, column))
    return figure


def sensitivity(frame: pd.DataFrame, workload: str, methods: Sequence[str] | None = None) -> Figure:
    """Final loss and gradient norm against lr; the flat part is what a user gains."""
    part = chosen(frame, workload, methods)
    columns = ["loss"] + ["grad_norm"] * bool(np.isfinite(part["grad_norm"]).any())
    figure, axes = canvas(len(columns), 3.1, part["method"], _rings(part))
    for axis, column in zip(axes, columns):
        sensitivity_panel(axis, frame, column, workload, methods)
        axis.set_ylabel(NAMES[column], fontsize=9, labelpad=2)
    return figure


def sensitivity_grid(
    frame: pd.DataFrame,
    methods: Sequence[str] | None = None,
    workloads: Sequence[str] | None = None,
) -> Figure:
    """Final loss against lr for several workloads, all if None, one small panel each."""
    names = sorted(frame["workload"].unique()) if workloads is None else workloads
    part = frame[frame["workload"].isin(names)]
    part = part if methods is None else part[part["method"].isin(methods)]
    figure, axes = canvas(len(names), 1.9, part["method"], _rings(part))
    for axis, name in zip(axes, names):
        sensitivity_panel(axis, frame, "loss", name, methods)
    side_label(figure, axes, NAMES["loss"])
    return figure


def _bands(frame: pd.DataFrame) -> str:
    if frame["seed"].nunique() > 1:
        return "lines: median over seeds; bands: lowest to highest; crosses: diverged in most runs"
    return "one seed; crosses: diverged"


def _rings(frame: pd.DataFrame) -> str:
    spread = "median over seeds, bars: lowest to highest" if frame["seed"].nunique() > 1 else ""
    rings = "rings: the method's default lr" if frame["default"].any() else ""
    return "; ".join(text for text in (spread, rings) if text)


def cost_of_not_tuning(frame: pd.DataFrame) -> Figure:
    """A map of `lost` in per cent, methods by workloads, with the least costly method on top."""
    cost = scores.cost_of_not_tuning(frame)
    grid, texts = scores.cost_map(cost)
    rows, columns = grid.shape
    notes = scores.mean_lost(cost)["note"].items()
    names = [shown(name + note.replace(" workloads", "")) for name, note in notes]
    side = 0.12 + LETTER * max(map(len, names))
    foot = 0.15 + 0.045 * min(LONGEST, max(map(len, grid.columns)))
    height = 0.48 + 0.24 * rows + foot
    figure = Figure(figsize=(WIDTH, height))
    axis: Any = figure.add_axes(
        (side / WIDTH, foot / height, 1 - (side + 0.05) / WIDTH, 0.24 * rows / height)
    )
    shade = np.sqrt(grid.clip(lower=0.0, upper=1.0)).to_numpy()
    axis.pcolormesh(shade, cmap="Oranges", vmin=0, vmax=1.15, edgecolor="white", linewidth=1.2)
    for (i, j), text in np.ndenumerate(texts.to_numpy()):
        colour = "white" if shade[i, j] > 0.75 else "black"
        axis.text(
            j + 0.5,
            i + 0.5,
            text,
            ha="center",
            va="center",
            fontsize=min(7.5, 13 * WIDTH / columns),
            color=colour,
            weight="bold" if j == columns - 1 else "normal",
        )
    axis.set_xticks(
        np.arange(columns) + 0.5, list(map(shown, grid.columns)), rotation=35, ha="right"
    )
    axis.set_yticks(np.arange(rows) + 0.5, names)
    for label, method in zip(axis.get_yticklabels(), grid.index):
        label.set_weight("bold" if stands_out(method) else "normal")
    axis.invert_yaxis()
    axis.tick_params(length=0, labelsize=8, pad=2)
    axis.spines[:].set_visible(False)
    axis.set_title(
        "Cost of not tuning: per cent of the possible decrease of the loss\n"
        "that the default leaves on the table (0 = the best of all methods, tuned)",
        fontsize=9,
        x=0.5 - side / 2 / (WIDTH - side),
    )
    return figure


def target_maps(grids: Mapping[str, pd.DataFrame]) -> Figure:
    """Maps of the share of the budget at which a target is reached, the earliest the strongest.

    Args:
        grids: By title, methods by workloads; what is not finite was missed.
    """
    names = [shown(str(name)) for grid in grids.values() for name in grid.index]
    side, foot, cell = 0.12 + LETTER * max(map(len, names)), 0.85, 0.26
    height = sum(0.3 + cell * len(grid) + foot for grid in grids.values())
    figure, top = Figure(figsize=(WIDTH, height)), height
    for title, grid in grids.items():
        top -= 0.3 + cell * len(grid)
        place = (side / WIDTH, top / height, 1 - (side + 0.05) / WIDTH, cell * len(grid) / height)
        axis: Any = figure.add_axes(place)
        values = grid.to_numpy(dtype=float)
        early = np.where(np.isfinite(values), 1.05 - values, np.nan)
        axis.pcolormesh(early, cmap="Blues", vmin=0, vmax=0.9, edgecolor="white", linewidth=1.2)
        for (i, j), value in np.ndenumerate(values):
            missed = not np.isfinite(value)
            axis.text(
                j + 0.5,
                i + 0.5,
                "missed" if missed else f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7.5,
                color="0.45" if missed else "white" if value < 0.6 else "black",
            )
        columns = [shown(str(name)) for name in grid.columns]
        axis.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=35, ha="right")
        axis.set_yticks(np.arange(len(grid)) + 0.5, [shown(str(name)) for name in grid.index])
        for label, method in zip(axis.get_yticklabels(), grid.index):
            label.set_weight("bold" if stands_out(method) else "normal")
        axis.invert_yaxis()
        axis.tick_params(length=0, labelsize=8, pad=2)
        axis.spines[:].set_visible(False)
        axis.set_title(title, loc="left", fontsize=9)
        top -= foot
    return figure


def performance_profile(
    frame: pd.DataFrame,
    fraction: float = TARGET_AT,
    setters: Sequence[str] = CLASSICS,
) -> Figure:
    """How many workloads' targets are reached within tau times the fastest method's time."""
    profiles = {
        best_lr: profile_of(frame, best_lr=best_lr, fraction=fraction, setters=setters)
        for best_lr in (False, True)
    }
    longest = max((len(shown(m)) for p in profiles.values() for m in p.rho.index), default=0)
    side = SAMPLE + 0.1 + 0.062 * (longest + 5)
    entries = max(len(profile.rho) for profile in profiles.values())
    tall = max(2.2, 0.145 * (entries + 1.5))
    figure, axes = canvas(2, tall, columns=1, above=ABOVE + LINE, right=side)
    for axis, (best_lr, profile) in zip(axes, profiles.items()):
        handles = {}
        for method in back_to_front(profile.rho.index):
            style = style_of(method).line() | {"markersize": 4}
            (line,) = axis.plot(
                profile.rho.columns,
                profile.rho.loc[method],
                drawstyle="steps-post",
                markevery=0.2,
                **style,
            )
            tag(line, method)
            handles[method] = line
        axis.legend(
            [handles[name] for name in profile.scores.index],
            [f"{score:.2f} {shown(name)}" for name, score in profile.scores.items()],
            title="score",
            loc="upper left",
            bbox_to_anchor=(1.0, 1.04),
            fontsize=7.5,
            title_fontsize=7.5,
            frameon=False,
            handlelength=3.2,
            labelspacing=0.25,
        )
        axis.set(xlim=(1, profile.rho.columns[-1]), ylim=(-0.02, 1.02))
        axis.set_xlabel("τ: times the evaluations of the fastest method", fontsize=9)
        axis.set_title(_each(frame, best_lr=best_lr), fontsize=9)
        axis.set_ylabel(f"share of the workloads ({profile.ratios.shape[1]})", fontsize=9)
        grid_lines(axis)
    return figure


def _each(frame: pd.DataFrame, *, best_lr: bool) -> str:
    if not best_lr:
        return "each at its default lr"
    return "each at its best lr" + (f"\n({ONE_LR})" if any_left_out(frame) else "")


@finals.once
def curves_of(frame: pd.DataFrame, column: str, best_lr: bool) -> pd.DataFrame:
    """The curves over seeds of each method at its default or its best lr, and its `loss`."""
    settings = finals.at(frame, best_lr=best_lr)[[*SETTING, "loss"]]
    return curves_over_seeds(frame, column).merge(settings, on=SETTING)


def curve_limits(tables: Sequence[pd.DataFrame], start: float) -> tuple[float, float]:
    """The lowest median, and the highest but for what rises far above the start."""
    seen = finite(pd.concat(tables)["median"])
    top = seen.max(initial=-np.inf)
    return seen.min(initial=np.inf), min(top, 1.5 * start) if start > 0 else top


def why_empty(frame: pd.DataFrame, table: pd.DataFrame, *, best_lr: bool) -> str:
    """What to say in a panel of these curves of the frame if there is nothing to draw."""
    if len(table):
        return "every run diverged"
    if not frame.empty and len(finals.at(frame, best_lr=best_lr)):
        return "not measured"
    return "no method ran several lr" if best_lr else "no run at the default lr"


def curves_panel(
    axis: Any, table: pd.DataFrame, limits: tuple[float, float], title: str, empty: str
) -> None:
    """Median lines with bands, and a cross where most of a method's runs have diverged."""
    level_lines(axis, *(limits if len(table) else (np.inf, -np.inf)), empty)
    top = axis.get_ylim()[1]
    parts = dict(list(table.groupby("method", sort=False)))
    for method in back_to_front(parts):
        line = parts[method]
        known = line[np.isfinite(line["median"])]
        diverged = len(known) > 0 and np.isinf(line["loss"].iloc[0])
        if len(known) > MOST:
            known = known.iloc[np.unique(np.linspace(0, len(known) - 1, MOST).round().astype(int))]
        x, style = known["evaluations"].to_numpy(), style_of(method)
        # What goes further leaves the figure anyhow; inf cannot be drawn, nor markers up to 1e20.
        beyond = 1e3 * max(abs(top), 1e-300)
        low, median, high = (
            np.minimum(known[name].to_numpy(), beyond) for name in ("low", "median", "high")
        )
        (drawn,) = axis.plot(x, median, markevery=(0.05, 0.2), **style.line())
        tag(drawn, method)
        edge = np.column_stack([np.append(x, x[::-1]), np.append(low, high[::-1])])
        band = PolyCollection([edge], facecolor=style.colour, alpha=0.13, linewidth=0)
        axis.add_collection(band, autolim=False)
        tag(band, method, 1)
        if diverged:
            end = min(known["median"].iloc[-1], top)
            (cross,) = axis.plot(x[-1:], [end], "x", color=style.colour, ms=9, mew=2, clip_on=False)
            tag(cross, method, 2)
    headline(axis, title)
    axis.set_xlabel(EVALUATIONS, fontsize=8)
    grid_lines(axis)


def sensitivity_panel(
    axis: Any, frame: pd.DataFrame, column: str, workload: str, methods: Sequence[str] | None
) -> None:
    """Final values against lr; what diverged lies on a shelf above the axis."""
    table = chosen(finals.per_rate(frame), workload, methods)
    low, high = ("low", "high") if column == "loss" else ("grad_low", "grad_high")
    start = starts(frame, "train_loss" if column == "loss" else "grad_norm")[workload]
    seen = finite(table[column])
    limit = np.fmin(seen.max(initial=-np.inf), start if column == "loss" else 10 * start)
    empty = "every run diverged" if np.isinf(table["loss"]).all() else "not measured"
    level_lines(axis, seen.min(initial=np.inf), limit, empty)
    bottom, top = axis.get_ylim()
    log = axis.get_yscale() == "log"
    shelf = top * (top / bottom) ** 0.06 if log else top + 0.06 * (top - bottom)
    roof = top * (top / bottom) ** 0.12 if log else top + 0.12 * (top - bottom)
    axis.set_ylim(bottom, roof)
    axis.axhspan(top, roof, color="0.93", zorder=0)
    axis.text(0.01, 0.995, "diverged or above", transform=axis.transAxes, va="top", fontsize=7)
    parts = dict(list(table[table[column].notna()].sort_values("lr").groupby("method", sort=False)))
    for method in back_to_front(parts):
        line, style = parts[method], style_of(method)
        x, values = line["lr"].to_numpy(), line[column].to_numpy()
        inside = values <= top
        y = np.where(inside, values, shelf)
        (drawn,) = axis.plot(x, y, **style.line())
        tag(drawn, method)
        ends = zip(x, line[low].to_numpy(), np.minimum(line[high].to_numpy(), top))
        bars = LineCollection(
            [[(at, a), (at, b)] for (at, a, b), here in zip(ends, inside) if here],
            color=style.colour,
            alpha=0.5,
            linewidth=1,
        )
        axis.add_collection(bars, autolim=False)
        tag(bars, method, 1)
        own = line["default"].to_numpy()
        (ring,) = axis.plot(x[own], y[own], "o", ms=11, mfc="none", mec=style.colour, mew=1.2)
        tag(ring, method, 2)
    axis.set_xscale("log")
    log_ticks(axis.xaxis)
    axis.set_xlabel("learning rate", fontsize=8)
    headline(axis, workload)
    grid_lines(axis)


def slug(text: str) -> str:
    """The method's name as an identifier: "STORM+" is "stormplus", so that it is not STORM's."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("+", "plus")).strip("-")


def stands_out(method: str) -> bool:
    """Whether it is the library's own, or the reader's."""
    return method in OURS or method not in METHODS


def tag(artist: Any, method: str, number: int = 0) -> None:
    """Name an artist of a method in SVG, so that a page can hide it."""
    artist.set_gid(f"m--{slug(method)}--{number}")


def back_to_front(methods: Iterable[str]) -> list[str]:
    """The methods in the order of drawing: the library's own come last and lie on top."""
    return ordered(methods)[::-1]


def chosen(table: pd.DataFrame, workload: str, methods: Sequence[str] | None) -> pd.DataFrame:
    """The lines of a workload and of the methods asked for; of all methods if None."""
    wanted = table["workload"] == workload
    return table[wanted if methods is None else wanted & table["method"].isin(methods)]


@finals.once
def starts(frame: pd.DataFrame, column: str) -> pd.Series:
    """For each workload the median over its runs' first values; nan if none was measured."""
    known = frame[np.isfinite(frame[column])].sort_values("evaluations", kind="stable")
    first = known.groupby([*SETTING, "seed"], sort=False)[column].first()
    return first.groupby(level="workload").median().reindex(frame["workload"].unique())


def level_lines(axis: Any, low: float, high: float, empty: str = "every run diverged") -> None:
    """A logarithmic scale if everything is positive and spreads, and sensible limits."""
    if not (np.isfinite(low) and np.isfinite(high)):
        axis.text(0.5, 0.5, empty, ha="center", transform=axis.transAxes)
        return
    if low > 0 and high / low > 8:
        low = max(low, high / MOST_DECADES)  # one method at 1e-60 would press the rest together
        axis.set_yscale("log")
        pad = (high / low) ** 0.05
        axis.set_ylim(low / pad, high * pad)
        log_ticks(axis.yaxis)
    else:
        high = max(low, high)
        pad = 0.05 * (high - low) or 0.5 * abs(low) or 0.5
        axis.set_ylim(low - pad, high + pad)


def finite(values: Any) -> np.ndarray[Any, Any]:
    """The finite ones."""
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


def grid_lines(axis: Any) -> None:
    """Light lines that do not compete with the data."""
    axis.grid(True, which="major", color="0.88", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def log_ticks(axis: Any) -> None:
    """Few numbers that can be read: powers of ten, or 1, 2, 5 where they would be too few.

    They are plain text: matplotlib takes long to set formulas, and a page cannot search them.
    """
    low, high = axis.get_view_interval()
    near = high / low
    subs = (1, 1.5, 2, 3, 4, 6, 8) if near < 6 else (1, 2, 5) if near < 50 else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))


def power(value: float) -> str:
    """A number of a logarithmic axis: 0.01, 20, 10⁻⁵, 2·10⁻⁵."""
    if not value > 0 or 1e-3 <= value < 1e4:
        return f"{value:g}"
    exponent = math.floor(math.log10(value) + 1e-9)
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    first = f"{value / 10**exponent:.3g}"
    return f"10{raised}" if first == "1" else f"{first}·10{raised}"


def shown(text: str, most: int = LONGEST) -> str:
    """A name as a figure shows it: a dollar begins no formula, and what is too long is cut."""
    text = " ".join(text.split())
    text = text if len(text) <= most else text[: most - 1] + "…"
    return text.replace("$", r"\$")


def canvas(
    panels: int,
    tall: float,
    methods: Iterable[str] = (),
    words: str = "",
    *,
    labels: Mapping[str, str] | None = None,
    columns: int = COLUMNS,
    above: float = ABOVE,
    right: float = RIGHT,
) -> tuple[Figure, list[Any]]:
    """A figure as wide as the text, its panels, and below them one legend.

    Args:
        panels: How many.
        tall: Inches of a panel.
        methods: In the legend, in the table's order.
        words: Above the legend's entries.
        labels: What the legend calls the methods, if not by their names.
        columns: Panels side by side.
        above: Inches above a panel, for its title.
        right: Inches on the right of the last column.
    """
    columns = max(1, min(columns, panels))
    lines = -(-panels // columns)
    names = ordered(methods)
    text = textwrap.wrap(words, int((WIDTH - 0.2) / SMALL))
    texts = [shown((labels or {}).get(name, name)) for name in names]
    widest = max(map(len, texts), default=0)
    side_by_side = max(1, min(5, int(WIDTH / (SAMPLE + 0.1 + LETTER * widest))))
    entries = -(-len(names) // side_by_side)
    foot = LINE * (entries + len(text)) + (0.12 if entries or text else 0)
    height = lines * (above + tall + BELOW) + foot
    figure = Figure(figsize=(WIDTH, height))
    wide = (WIDTH - LEFT - right - (columns - 1) * BETWEEN) / columns
    axes = []
    for k in range(panels):
        left = LEFT + k % columns * (wide + BETWEEN)
        bottom = height - (k // columns + 1) * (above + tall + BELOW) + BELOW
        place = (left / WIDTH, bottom / height, wide / WIDTH, tall / height)
        axes.append(figure.add_axes(place))
    if names or text:
        handles = [Line2D([], [], **style_of(name).line()) for name in names]  # type: ignore[arg-type]
        below = figure.legend(
            handles,
            texts,
            loc="lower center",
            ncols=side_by_side,
            fontsize=8,
            title="\n".join(text),
            title_fontsize=8,
            frameon=False,
            handlelength=3.4,
            labelspacing=0.3,
            borderaxespad=0.1,
            columnspacing=1.2,
        )
        below.get_title().set_multialignment("center")
    return figure, axes


def headline(axis: Any, text: str) -> None:
    """A panel's title, each of its lines cut to the panel's width."""
    letters = int((axis.get_position().width * WIDTH + 0.2) / LETTER)
    axis.set_title("\n".join(shown(line, letters) for line in text.split("\n")), fontsize=9)


def side_label(figure: Figure, axes: Sequence[Any], text: str) -> None:
    """One label for the vertical axes of all panels."""
    boxes = [axis.get_position() for axis in axes]
    middle = (min(box.y0 for box in boxes) + max(box.y1 for box in boxes)) / 2 if boxes else 0.5
    figure.text(0.13 / WIDTH, middle, text, rotation=90, ha="center", va="center", fontsize=9)


def line_sample(method: str) -> Figure:
    """A short piece of the method's line, for a legend outside the figures."""
    figure = Figure(figsize=(0.6, 0.18))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style_of(method).line())  # type: ignore[arg-type]
    axis.set_xlim(0, 2)
    axis.axis("off")
    return figure
