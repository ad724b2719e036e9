"""The benchmark's figures: pure functions of the frame that `rows.load` gives.

First the figures, then the panels they are made of, then what all of them share.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from stormplus_bench import finals, scores
from stormplus_bench.finals import ONE_LR, SETTING, any_left_out
from stormplus_bench.methods import OURS, ordered
from stormplus_bench.profiles import CLASSICS, TARGET_AT
from stormplus_bench.profiles import curves as curves_over_seeds
from stormplus_bench.profiles import performance_profile as profile_of
from stormplus_bench.style import style_of

BANDS = "lines: median over seeds; bands: lowest to highest; crosses: diverged in most runs"
EVALUATIONS = "gradient evaluations"
INCHES_PER_ENTRY, LETTERS_PER_INCH = 1.8, 14  # of a legend
MOST = 80  # measurements of a curve that are drawn; more cannot be seen and make the page heavy
NAMES = {"train_loss": "training loss", "loss": "final training loss"}
NAMES |= {"valid_loss": "validation loss", "grad_norm": "final gradient norm"}


def curves(
    frame: pd.DataFrame,
    workload: str,
    column: str = "train_loss",
    methods: Sequence[str] | None = None,
) -> Figure:
    """A workload's curves, at the defaults (left) and at each method's best lr (right)."""
    frame = chosen(frame[frame["workload"] == workload], methods)
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplots(1, 2)
    tables = [curves_of(frame, column, best_lr=best_lr) for best_lr in (False, True)]
    limits = curve_limits(tables, finals.initial_loss(frame).median())
    for axis, table, best_lr in zip(axes, tables, (False, True)):
        title = f"{workload}: {_each(frame, best_lr=best_lr)}"
        empty = why_empty(frame, table, best_lr=best_lr)
        curves_panel(axis, table, limits, title, empty)
    axes[0].set_ylabel(NAMES.get(column, column))
    legend(figure, frame["method"], BANDS)
    return figure


def curves_grid(
    frame: pd.DataFrame,
    *,
    best_lr: bool = False,
    column: str = "train_loss",
    methods: Sequence[str] | None = None,
) -> Figure:
    """The curves of all workloads, one small panel each."""
    frame = chosen(frame, methods)
    figure, parts = panel_grid(frame)
    drawn: list[str] = []
    for axis, (workload, part) in parts:
        table = curves_of(part, column, best_lr=best_lr)
        limits = curve_limits([table], finals.initial_loss(part).median())
        empty = why_empty(part, table, best_lr=best_lr)
        curves_panel(axis, table, limits, workload, empty)
        drawn += table["method"].unique().tolist()
    figure.supylabel(NAMES.get(column, column), fontsize=10)
    legend(figure, drawn, f"{_each(frame, best_lr=best_lr)}; {BANDS}")
    return figure


def sensitivity(frame: pd.DataFrame, workload: str, methods: Sequence[str] | None = None) -> Figure:
    """Final loss and gradient norm against lr; the flat part is what a user gains."""
    frame = chosen(frame[frame["workload"] == workload], methods)
    columns = ["loss"] + ["grad_norm"] * bool(np.isfinite(frame["grad_norm"]).any())
    figure = Figure(figsize=(11 if len(columns) > 1 else 8, 5.4), layout="constrained")
    for axis, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns):
        sensitivity_panel(axis, frame, column, workload)
        axis.set_ylabel(NAMES[column])
    legend(figure, frame["method"], _rings(frame))
    return figure


def sensitivity_grid(frame: pd.DataFrame, methods: Sequence[str] | None = None) -> Figure:
    """Final loss against lr for all workloads, one small panel each."""
    frame = chosen(frame, methods)
    figure, parts = panel_grid(frame)
    for axis, (workload, part) in parts:
        sensitivity_panel(axis, part, "loss", workload)
    figure.supylabel(NAMES["loss"], fontsize=10)
    legend(figure, frame["method"], _rings(frame))
    return figure


def _rings(frame: pd.DataFrame) -> str:
    spread = "median over seeds, bars: lowest to highest" if frame["seed"].nunique() > 1 else ""
    rings = "rings: the method's default lr" if frame["default"].any() else ""
    return "; ".join(text for text in (spread, rings) if text)


def cost_of_not_tuning(frame: pd.DataFrame) -> Figure:
    """A map of `lost` in per cent, methods by workloads, with the least costly method on top."""
    cost = scores.cost_of_not_tuning(frame)
    mean = scores.mean_lost(cost)
    grid = cost.pivot(index="method", columns="workload", values="lost").reindex(mean.index)
    ran = cost.pivot(index="method", columns="workload", values="loss").reindex(mean.index)
    grid.insert(len(grid.columns), "mean", mean["mean"])
    rows, columns = grid.shape
    figure = Figure(figsize=(2.2 + 0.75 * columns, 1.6 + 0.3 * rows), layout="constrained")
    axis: Any = figure.subplots()
    shade = np.sqrt(grid.clip(lower=0.0, upper=1.0)).to_numpy()
    axis.pcolormesh(shade, cmap="Blues", vmin=0, vmax=1.15, edgecolor="white", linewidth=1.5)
    for (i, j), value in np.ndenumerate(grid.to_numpy()):
        missing = j < columns - 1 and np.isnan(ran.to_numpy()[i, j])
        colour = "white" if shade[i, j] > 0.75 else "black"
        axis.text(
            j + 0.5,
            i + 0.5,
            "·" if missing else scores.per_cent(value),
            ha="center",
            va="center",
            fontsize=8,
            color=colour,
            weight="bold" if j == columns - 1 else "normal",
        )
    axis.set_xticks(np.arange(columns) + 0.5, list(grid.columns), rotation=35, ha="right")
    axis.set_yticks(np.arange(rows) + 0.5, list(grid.index + mean["note"]))
    for label, method in zip(axis.get_yticklabels(), grid.index):
        label.set_weight("bold" if method in OURS else "normal")
    axis.invert_yaxis()
    axis.tick_params(length=0, labelsize=8.5)
    axis.spines[:].set_visible(False)
    axis.set_title(
        "Cost of not tuning: per cent of the possible decrease of the loss\n"
        "that the default leaves on the table (0 = the best of all methods, tuned)",
        fontsize=10,
    )
    return figure


def performance_profile(
    frame: pd.DataFrame,
    fraction: float = TARGET_AT,
    setters: Sequence[str] = CLASSICS,
) -> Figure:
    """How many workloads' targets are reached within tau times the fastest method's time."""
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    for axis, best_lr in zip(figure.subplots(1, 2), (False, True)):
        profile = profile_of(frame, best_lr=best_lr, fraction=fraction, setters=setters)
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
            [f"{score:.2f} {name}" for name, score in profile.scores.items()],
            title="score",
            loc="upper left",
            bbox_to_anchor=(1.01, 1.02),
            fontsize=8,
            title_fontsize=8,
            frameon=False,
            handlelength=3.2,
            labelspacing=0.35,
        )
        axis.set(xlim=(1, profile.rho.columns[-1]), ylim=(-0.02, 1.02))
        axis.set_xlabel(r"$\tau$: times the evaluations of the fastest method", fontsize=9)
        axis.set_title(_each(frame, best_lr=best_lr), fontsize=10)
        axis.set_ylabel(f"share of the workloads ({profile.ratios.shape[1]})", fontsize=9)
        grid_lines(axis)
    return figure


def _each(frame: pd.DataFrame, *, best_lr: bool) -> str:
    if not best_lr:
        return "each at its default lr"
    return "each at its best lr" + (f"\n({ONE_LR})" if any_left_out(frame) else "")


def panel_grid(frame: pd.DataFrame) -> tuple[Figure, list[tuple[Any, tuple[str, pd.DataFrame]]]]:
    """A figure with an empty panel for each workload, and the workload's rows."""
    parts = list(frame.groupby("workload", sort=True))
    rows, columns = shape(len(parts))
    size = (1 + 3.5 * columns, 1.4 + 2.5 * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(parts) :]:
        axis.set_visible(False)
    return figure, list(zip(axes, parts))


def curves_of(frame: pd.DataFrame, column: str, *, best_lr: bool) -> pd.DataFrame:
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
    if len(finals.at(frame, best_lr=best_lr)):
        return "not measured"
    return "no method ran several lr" if best_lr else "no run at the default lr"


def curves_panel(
    axis: Any, table: pd.DataFrame, limits: tuple[float, float], title: str, empty: str
) -> None:
    """Median lines with bands, and a cross where most of a method's runs have diverged."""
    level_lines(axis, *(limits if len(table) else (np.inf, -np.inf)), empty)
    top = axis.get_ylim()[1]
    for method in back_to_front(table["method"]):
        line = table[table["method"] == method]
        known = line[np.isfinite(line["median"])]
        diverged = len(known) > 0 and np.isinf(line["loss"].iloc[0])
        if len(known) > MOST:
            known = known.iloc[np.unique(np.linspace(0, len(known) - 1, MOST).round().astype(int))]
        x, style = known["evaluations"].to_numpy(), style_of(method)
        (drawn,) = axis.plot(x, known["median"], markevery=(0.05, 0.2), **style.line())
        tag(drawn, method)
        # A band without an upper end leaves the figure; inf itself cannot be drawn.
        ceiling = known["high"].replace(np.inf, 1e3 * max(abs(top), 1e-300))
        band = axis.fill_between(
            x, known["low"], ceiling, color=style.colour, alpha=0.13, linewidth=0
        )
        tag(band, method, 1)
        if diverged:
            end = min(known["median"].iloc[-1], top)
            (cross,) = axis.plot(x[-1:], [end], "x", color=style.colour, ms=9, mew=2, clip_on=False)
            tag(cross, method, 2)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(EVALUATIONS, fontsize=9)
    grid_lines(axis)


def sensitivity_panel(axis: Any, frame: pd.DataFrame, column: str, title: str) -> None:
    """Final values against lr; what diverged lies on a shelf above the axis."""
    table = finals.per_rate(frame)
    low, high = ("low", "high") if column == "loss" else ("grad_low", "grad_high")
    source = "train_loss" if column == "loss" else "grad_norm"
    first = frame.dropna(subset=[source]).sort_values("evaluations").groupby(list(SETTING))
    start = first[source].first().replace(np.inf, np.nan).median()
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
    axis.text(0.01, 0.995, "diverged or above", transform=axis.transAxes, va="top", fontsize=7.5)
    for method in back_to_front(table["method"]):
        line = table[(table["method"] == method) & table[column].notna()].sort_values("lr")
        style = style_of(method)
        y = line[column].where(line[column] <= top, shelf)
        (drawn,) = axis.plot(line["lr"], y, **style.line())
        tag(drawn, method)
        inside = (line[column] <= top).to_numpy()
        bars = axis.vlines(
            line["lr"][inside],
            line[low][inside],
            line[high].clip(upper=top)[inside],
            color=style.colour,
            alpha=0.5,
            linewidth=1,
        )
        tag(bars, method, 1)
        own = line["default"].to_numpy()
        (ring,) = axis.plot(
            line["lr"][own], y[own], "o", ms=11, mfc="none", mec=style.colour, mew=1.2
        )
        tag(ring, method, 2)
    axis.set_xscale("log")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("learning rate", fontsize=9)
    axis.set_title(title, fontsize=10)
    grid_lines(axis)


def slug(text: str) -> str:
    """The method's name as an identifier: "STORM+" is "stormplus", so that it is not STORM's."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("+", "plus")).strip("-")


def tag(artist: Any, method: str, number: int = 0) -> None:
    """Name an artist of a method in SVG, so that a page can hide it."""
    artist.set_gid(f"m--{slug(method)}--{number}")


def back_to_front(methods: Iterable[str]) -> list[str]:
    """The methods in the order of drawing: the library's own come last and lie on top."""
    return ordered(methods)[::-1]


def chosen(frame: pd.DataFrame, methods: Sequence[str] | None) -> pd.DataFrame:
    """The rows of the methods asked for; all if None."""
    return frame if methods is None else frame[frame["method"].isin(methods)]


def level_lines(axis: Any, low: float, high: float, empty: str = "every run diverged") -> None:
    """A logarithmic scale if everything is positive and spreads, and sensible limits."""
    if not (np.isfinite(low) and np.isfinite(high)):
        axis.text(0.5, 0.5, empty, ha="center", transform=axis.transAxes)
        return
    if low > 0 and high / low > 8:
        axis.set_yscale("log")
        pad = (high / low) ** 0.05
        axis.set_ylim(low / pad, high * pad)
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
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def legend(figure: Figure, methods: Iterable[str], title: str, columns: int = 6) -> None:
    """One legend below the figure, in the table's order, not wider than the figure."""
    names = ordered(methods)
    width = figure.get_figwidth()
    columns = min(columns, int(width / INCHES_PER_ENTRY))
    handles = [Line2D([], [], **style_of(name).line()) for name in names]  # type: ignore[arg-type]
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=min(columns, max(1, len(names))),
        fontsize=8.5,
        title=textwrap.fill(title, int(width * LETTERS_PER_INCH)),
        title_fontsize=8.5,
        frameon=False,
        handlelength=3.4,
    )


def shape(panels: int, width: int = 3) -> tuple[int, int]:
    """Rows and columns of a grid of so many panels."""
    columns = min(width, max(1, panels))
    return -(-panels // columns), columns


def line_sample(method: str) -> Figure:
    """A short piece of the method's line, for a legend outside the figures."""
    figure = Figure(figsize=(0.6, 0.18))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style_of(method).line())  # type: ignore[arg-type]
    axis.set_xlim(0, 2)
    axis.axis("off")
    return figure
