"""Colour, dash and marker of each method, the same in every figure.

Dashes and markers tell lines apart without colour.
"""

import zlib
from dataclasses import dataclass

from stormplus_bench.methods import METHODS, OURS

WIDTH = 7.6  # inches: one column of text
# In the order of METHODS, repeated with other dashes; apart for colour-blind readers.
COLOURS = (
    *("#d9480f", "#c2a000", "#087f5b", "#e8308a", "#e599b5", "#7048e8", "#b197fc", "#495057"),
    *("#212529", "#1971c2", "#4dabf7", "#8d6e3f", "#0b7285", "#5c940d", "#3bc9db"),
)
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.2, 1.6), (6, 2, 1.2, 2))
MARKERS = "os*^vDdx+PX<>p8hH|_1234"


@dataclass(frozen=True)
class Style:
    """How a method is drawn; `dash` holds the lengths of strokes and gaps."""

    colour: str
    dash: tuple[float, ...]
    marker: str
    width: float

    def line(self) -> dict[str, object]:
        """Return the keyword arguments of matplotlib's `plot`."""
        line = {"color": self.colour, "linestyle": (0, self.dash), "linewidth": self.width}
        edge = {"markerfacecolor": "white", "markeredgecolor": self.colour}
        return {**line, "marker": self.marker, "markersize": 4.5, **edge}


def style_of(method: str) -> Style:
    """Return the method's style; an unknown method gets one by the checksum of its name."""
    number = METHODS.index(method) if method in METHODS else zlib.crc32(method.encode())
    # The library's methods and the reader's own have thicker lines than their rivals.
    width = 2.2 if method in OURS or method not in METHODS else 1.3
    return Style(
        COLOURS[number % len(COLOURS)],
        DASHES[number % len(DASHES)],
        MARKERS[number % len(MARKERS)],
        width,
    )
