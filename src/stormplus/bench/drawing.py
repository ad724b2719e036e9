"""What the benchmark's figures have in common: lines, scales, legends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus.bench.style import ordered, style_of

try:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:  # pragma: no cover
    raise ImportError("the figures need matplotlib: pip install 'stormplus[bench]'") from error

# What the small overviews show; all methods together would be a thicket.
HEADLINE = ("STORM+", "STORM+ mean", "Untuned", "SGD momentum", "Adam", "AdaGrad", "Prodigy")
EVALUATIONS = "gradient evaluations"
INCHES_PER_ENTRY, LETTERS_PER_INCH = 1.8, 14  # of a legend
NAMES = {"train_loss": "training loss", "loss": "final training loss"}
NAMES |= {"valid_loss": "validation loss", "grad_norm": "final gradient norm"}


def slug(text: str) -> str:
    """A method's name for an identifier; "+" is kept apart from nothing."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("+", "plus")).strip("-")


def tag(artist: Any, method: str, number: int = 0) -> None:
    """Name an artist of a method in SVG, so that a page can hide it."""
    artist.set_gid(f"m--{slug(method)}--{number}")


def front_last(methods: Iterable[str]) -> list[str]:
    """The methods in the order of drawing: the library's own come last, on top."""
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
    """Rows and columns of a grid of panels."""
    columns = min(width, max(1, panels))
    return -(-panels // columns), columns


def sample(method: str) -> Figure:
    """A short piece of the method's line, for a legend outside the figures."""
    figure = Figure(figsize=(0.6, 0.18))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style_of(method).line())  # type: ignore[arg-type]
    axis.set_xlim(0, 2)
    axis.axis("off")
    return figure
