"""The rate experiment's figure: a pure function of its results."""

from __future__ import annotations

from typing import Any

import numpy as np

from stormplus.install import how_to
from stormplus.theory.palette import PALETTE, WIDTH
from stormplus.theory.problems.base import Array
from stormplus.theory.rates.experiment import METHODS, Plan, Result
from stormplus.theory.rates.report import NAMES, label

try:
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError(f"the figure needs matplotlib: {how_to('theory')}") from error

COLOURS = {method: PALETTE[name] for method, (name, _) in NAMES.items()}
MARKERS = dict(zip(METHODS, "os^vD", strict=True))  # for those who see few colours


def draw(results: dict[str, Result], plan: Plan) -> Figure:
    """Four panels on log-log scales: the mean and the RMS with noise, both without, sigma."""
    figure = Figure(figsize=(WIDTH, 7.6), layout="constrained")
    axes = figure.subplots(2, 2)
    noisy = plan.sigmas[-1]
    panels = (
        (axes[0, 0], -1, False, rf"mean over $x_1..x_T$, $\sigma={noisy:g}$", (-1 / 3, -1 / 4)),
        (axes[0, 1], -1, True, rf"RMS over $x_1..x_T$, $\sigma={noisy:g}$", (-1 / 3, -1 / 4)),
        (axes[1, 0], 0, True, r"RMS (line) and mean (dashed), $\sigma=0$", (-1 / 2,)),
    )
    for axis, column, root, title, references in panels:
        for name, result in reversed(results.items()):  # STORM+ on top
            runs = result.square[:, column] if root else result.mean[:, column]
            _curve(axis, plan.checkpoints, runs, name, root=root)
            if column == 0:
                mean = result.mean[:, 0].mean(1)
                axis.plot(plan.checkpoints, mean, "--", color=COLOURS[name], linewidth=1)
        _finish(axis, title, "T (samples)", r"$|\nabla f(\bar x_T)|$")
        axis.axvspan(*plan.window, color="0.5", alpha=0.08, zorder=0)
        for power in references:
            _reference(axis, plan.checkpoints, power)
    _sigma_panel(axes[1, 1], results, plan)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        lines[::-1],
        labels[::-1],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        title_fontsize=8,
        title=f"{len(plan.seeds)} seeds; bands: 95 % over seeds; grey: the window of the fit",
    )
    return figure


def _curve(axis: Any, x: Any, runs: Array, name: str, *, root: bool) -> None:
    colour, marker = COLOURS[name], MARKERS[name]
    # The mean's band: 1.96 standard errors over seeds, carried through the root.
    centre = runs.mean(1)
    spread = 1.96 * runs.std(1, ddof=1) / runs.shape[1] ** 0.5
    low, high = np.maximum(centre - spread, centre / 10), centre + spread
    if root:
        centre, low, high = (np.sqrt(value) for value in (centre, low, high))
    axis.loglog(
        x, centre, color=colour, marker=marker, markersize=4, markevery=3, label=label(name)
    )
    axis.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)


def _reference(axis: Any, x: Any, power: float) -> None:
    """A grey line of the theory's slope through the upper right of the data."""
    x = np.asarray(x, dtype=np.float64)
    low, high = axis.get_ylim()
    start = high * 0.75
    axis.plot(x, start * (x / x[0]) ** power, color="0.35", linestyle=":", linewidth=1.5)
    name = f"slope {power:.2f}".replace("-0.33", "-1/3").replace("-0.25", "-1/4")
    axis.annotate(
        name.replace("-0.50", "-1/2"),
        (x[-1], start * (x[-1] / x[0]) ** power),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="0.25",
    )
    axis.set_xlim(x[0] / 1.5, x[-1] * (x[-1] / x[0]) ** 0.2)  # room for the label
    axis.set_ylim(low, high)


def _sigma_panel(axis: Any, results: dict[str, Result], plan: Plan) -> None:
    """At the largest T, against sigma; the dashed levels are sigma = 0."""
    sigmas = np.array(plan.sigmas[1:])
    for name, result in reversed(results.items()):
        _curve(axis, sigmas, result.mean[-1, 1:], name, root=False)
        level = result.mean[-1, 0].mean()
        axis.axhline(level, color=COLOURS[name], linestyle="--", linewidth=1)
    anchor = results[next(iter(results))].mean[-1, -1].mean()
    axis.plot(sigmas, anchor * (sigmas / sigmas[-1]) ** (1 / 3) * 0.8, ":", color="0.35")
    axis.annotate(
        r"$\sigma^{1/3}$",
        (sigmas[0], anchor * (sigmas[0] / sigmas[-1]) ** (1 / 3) * 0.8),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color="0.25",
    )
    axis.set_xlim(sigmas[0] / 2.5, sigmas[-1] * 1.3)
    _finish(
        axis,
        rf"mean at $T={plan.steps:,}$; dashed: $\sigma=0$",
        r"$\sigma$",
        r"$|\nabla f(\bar x_T)|$",
    )


def _finish(axis: Any, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(True, which="major", alpha=0.3)
