"""The benchmark's figures: pure functions of the frame that `rows.load` gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure

from stormplus.bench import drawing, panels, scores
from stormplus.bench.finals import ONE_LR, any_left_out
from stormplus.bench.style import ordered, style_of

BANDS = "lines: median over seeds; bands: lowest to highest; crosses: diverged in most runs"


def curves(
    frame: pd.DataFrame,
    workload: str,
    column: str = "train_loss",
    methods: Sequence[str] | None = None,
) -> Figure:
    """A workload's curves, at the defaults (left) and at each method's best lr (right)."""
    frame = drawing.chosen(frame[frame["workload"] == workload], methods)
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplots(1, 2)
    tables = [panels.curves_of(frame, column, best_lr=best_lr) for best_lr in (False, True)]
    limits = panels.curve_limits(tables, scores.initial_loss(frame).median())
    for axis, table, best_lr in zip(axes, tables, (False, True)):
        title = f"{workload}: {_each(frame, best_lr=best_lr)}"
        empty = panels.why_empty(frame, table, best_lr=best_lr)
        panels.curves_panel(axis, table, limits, title, empty)
    axes[0].set_ylabel(drawing.NAMES.get(column, column))
    drawing.legend(figure, frame["method"], BANDS)
    return figure


def curves_grid(
    frame: pd.DataFrame,
    *,
    best_lr: bool = False,
    column: str = "train_loss",
    methods: Sequence[str] | None = None,
) -> Figure:
    """The curves of all workloads, one small panel each."""
    frame = drawing.chosen(frame, methods)
    figure, parts = panels.panel_grid(frame)
    drawn: list[str] = []
    for axis, (workload, part) in parts:
        table = panels.curves_of(part, column, best_lr=best_lr)
        limits = panels.curve_limits([table], scores.initial_loss(part).median())
        empty = panels.why_empty(part, table, best_lr=best_lr)
        panels.curves_panel(axis, table, limits, workload, empty)
        drawn += table["method"].unique().tolist()
    figure.supylabel(drawing.NAMES.get(column, column), fontsize=10)
    drawing.legend(figure, drawn, f"{_each(frame, best_lr=best_lr)}; {BANDS}")
    return figure


def sensitivity(frame: pd.DataFrame, workload: str, methods: Sequence[str] | None = None) -> Figure:
    """Final loss and gradient norm against lr; the flat part is what a user gains."""
    frame = drawing.chosen(frame[frame["workload"] == workload], methods)
    columns = ["loss"] + ["grad_norm"] * bool(np.isfinite(frame["grad_norm"]).any())
    figure = Figure(figsize=(11 if len(columns) > 1 else 8, 5.4), layout="constrained")
    for axis, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns):
        panels.sensitivity_panel(axis, frame, column, workload)
        axis.set_ylabel(drawing.NAMES[column])
    drawing.legend(figure, frame["method"], _rings(frame))
    return figure


def sensitivity_grid(frame: pd.DataFrame, methods: Sequence[str] | None = None) -> Figure:
    """Final loss against lr for all workloads, one small panel each."""
    frame = drawing.chosen(frame, methods)
    figure, parts = panels.panel_grid(frame)
    for axis, (workload, part) in parts:
        panels.sensitivity_panel(axis, part, "loss", workload)
    figure.supylabel(drawing.NAMES["loss"], fontsize=10)
    drawing.legend(figure, frame["method"], _rings(frame))
    return figure


def _rings(frame: pd.DataFrame) -> str:
    spread = "median over seeds, bars: lowest to highest" if frame["seed"].nunique() > 1 else ""
    rings = "rings: the method's default lr" if frame["default"].any() else ""
    return "; ".join(text for text in (spread, rings) if text)


def cost_of_not_tuning(frame: pd.DataFrame) -> Figure:
    """A map of `lost`, in per cent: methods by workloads, the least costly method on top."""
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
            "·" if missing else per_cent(value),
            ha="center",
            va="center",
            fontsize=8,
            color=colour,
            weight="bold" if j == columns - 1 else "normal",
        )
    axis.set_xticks(np.arange(columns) + 0.5, list(grid.columns), rotation=35, ha="right")
    axis.set_yticks(np.arange(rows) + 0.5, list(grid.index + mean["note"]))
    for label in axis.get_yticklabels():
        label.set_weight("bold" if "STORM+" in label.get_text() else "normal")
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
    fraction: float = scores.TARGET_AT,
    setters: Sequence[str] = scores.CLASSICS,
) -> Figure:
    """How many workloads' targets are reached within tau times the fastest method's time."""
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    for axis, best_lr in zip(figure.subplots(1, 2), (False, True)):
        profile = scores.performance_profile(
            frame, best_lr=best_lr, fraction=fraction, setters=setters
        )
        handles = {}
        for method in drawing.front_last(profile.rho.index):
            style = style_of(method).line() | {"markersize": 4}
            (line,) = axis.plot(
                profile.rho.columns,
                profile.rho.loc[method],
                drawstyle="steps-post",
                markevery=0.2,
                **style,
            )
            drawing.tag(line, method)
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
        drawing.grid_lines(axis)
    return figure


def _each(frame: pd.DataFrame, *, best_lr: bool) -> str:
    if not best_lr:
        return "each at its default lr"
    return "each at its best lr" + (f"\n({ONE_LR})" if any_left_out(frame) else "")


def per_cent(value: float) -> str:
    """`lost` in per cent, in as many places as a cell has."""
    if np.isnan(value):
        return "n/a"
    if np.isinf(value):
        return "div."
    value *= 100
    if value == 0 or value > 999:
        return ">999" if value else "0"
    return "<0.1" if 0 < value < 0.095 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def methods_of(frame: pd.DataFrame) -> list[str]:
    """The methods in the frame, in the table's order."""
    return ordered(frame["method"])
