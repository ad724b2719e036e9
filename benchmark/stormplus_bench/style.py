"""Colour, dash and marker of each method, the same in every figure.

Dashes and markers tell lines apart without colour.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from stormplus_bench.methods import METHODS, OURS

WIDTH = 7.6  # inches: one column of text
PALETTE = {
    "STORM+": "#d9480f",
    "STORM+ mean": "#c2a000",
    "Untuned": "#087f5b",
    "simplified STORM+": "#e8308a",
    "simplified STORM+ mean": "#e599b5",
    "STORM": "#7048e8",
    "STORM mean": "#b197fc",
    "SGD": "#495057",
    "SGD momentum": "#212529",
    "Adam": "#1971c2",
    "AdamW": "#4dabf7",
    "AdaGrad": "#8d6e3f",
    "AdaGrad-norm": "#b08968",
    "RMSprop": "#0b7285",
    "Schedule-Free": "#5c940d",
    "Prodigy": "#3bc9db",
    "D-Adaptation": "#a61e4d",
    "DoG": "#2b8a3e",
    "Mechanic": "#5f3dc4",
    "MARS": "#0ca678",
    "SVRG": "#868e96",
    "AdamW cosine": "#1864ab",
    "Schedule-Free warm-up": "#74b816",
    "Prodigy cosine": "#15aabf",
    "Adam++": "#e67700",
    "Adam++ cosine": "#ffc078",
    "NadamW": "#c2185b",
    "SCSG": "#66a80f",
    "SPIDER": "#1098ad",
    "Hybrid SARAH": "#9c36b5",
}
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.2, 1.6), (6, 2, 1.2, 2), (9, 3))
MARKERS = "os*^vDdx+PX<>p8hH|_1234"
SPARE_COLOURS = (
    *("#c2255c", "#364fc7", "#862e9c", "#e31a1c", "#00897b", "#5d4037"),
    *("#ad1457", "#283593", "#33a02c", "#6a3d9a", "#b15928", "#0072b2"),
)


@dataclass(frozen=True)
class Style:
    """How a method is drawn; `dash` holds the lengths of strokes and gaps."""

    colour: str
    dash: tuple[float, ...]
    marker: str
    width: float

    def line(self) -> dict[str, object]:
        """Return the keyword arguments of matplotlib's `plot`."""
        return {
            "color": self.colour,
            "linestyle": (0, self.dash),
            "marker": self.marker,
            "linewidth": self.width,
            "markersize": 4.5,
            "markerfacecolor": "white",
            "markeredgecolor": self.colour,
        }


def style_of(method: str) -> Style:
    """Return the method's style; an unknown method gets one by the checksum of its name."""
    if method in METHODS and method in PALETTE:
        number = METHODS.index(method)
        colour = PALETTE[method]
    else:
        number = zlib.crc32(method.encode())
        colour = SPARE_COLOURS[number % len(SPARE_COLOURS)]
    # The library's methods and the reader's own have thicker lines than their rivals.
    width = 2.2 if method in OURS or method not in METHODS else 1.3
    return Style(colour, DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)], width)
