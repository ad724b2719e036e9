"""How each method is drawn, the same in every figure.

Colours are the repository's palette. A dash and a marker of its own tell a line apart for people
who see few colours, and on a grey print.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import product

from stormplus.theory.palette import PALETTE
from stormplus_bench.methods import OURS

Dash = tuple[float, tuple[float, ...]]
SOLID: Dash = (0, ())
DASHED: Dash = (0, (5, 2))
DOTTED: Dash = (0, (1.2, 1.6))
DASH_DOT: Dash = (0, (6, 2, 1.2, 2))
LONG: Dash = (0, (9, 3))


@dataclass(frozen=True)
class Style:
    """How a method is drawn; `dash` is matplotlib's (offset, lengths)."""

    colour: str
    dash: Dash
    marker: str
    width: float = 1.3

    def line(self) -> dict[str, object]:
        """The keyword arguments of matplotlib's `plot`."""
        return {
            "color": self.colour,
            "linestyle": self.dash,
            "marker": self.marker,
            "linewidth": self.width,
            "markersize": 4.5,
            "markerfacecolor": "white",
            "markeredgecolor": self.colour,
        }


_LOOKS = {
    "STORM+": (SOLID, "o"),
    "STORM+ mean": (DASHED, "s"),
    "Untuned": (DASH_DOT, "*"),
    "simplified STORM+": (SOLID, "^"),
    "simplified STORM+ mean": (DASHED, "v"),
    "STORM": (SOLID, "D"),
    "STORM mean": (DASHED, "d"),
    "SGD": (SOLID, "x"),
    "SGD momentum": (DASHED, "+"),
    "Adam": (SOLID, "P"),
    "AdamW": (DASHED, "X"),
    "AdaGrad": (SOLID, "<"),
    "RMSprop": (DASHED, ">"),
    "Schedule-Free": (SOLID, "p"),
    "Prodigy": (DASHED, "h"),
    "DoG": (DOTTED, "8"),
    "D-Adaptation": (DASH_DOT, "1"),
    "Mechanic": (LONG, "2"),
    "MARS": (SOLID, "3"),
    "SVRG": (DASHED, "4"),
    "AdamW cosine": (SOLID, "$a$"),
    "Schedule-Free warm-up": (DASHED, "$s$"),
    "Prodigy cosine": (DOTTED, "$p$"),
    "Adam++": (LONG, "$+$"),
    "Adam++ cosine": (DASH_DOT, "$c$"),
    "NadamW": (SOLID, "$n$"),
}
STYLES = {
    # The subject of the figures has the thicker lines.
    name: Style(PALETTE[name], dash, marker, 2.2 if name in OURS else 1.3)
    for name, (dash, marker) in _LOOKS.items()
}
# For methods of a reader's own, who looks for them: they too have the thicker lines. So many that
# two of them hardly ever look alike.
_SPARE = [
    Style(colour, dash, marker, 2.2)
    for colour, dash, marker in product(
        (
            *("#c2255c", "#364fc7", "#862e9c", "#e31a1c", "#00897b", "#5d4037"),
            *("#ad1457", "#283593", "#33a02c", "#6a3d9a", "#b15928", "#0072b2"),
        ),
        (SOLID, DASH_DOT, LONG, DOTTED),
        ("H", "|", "_"),
    )
]


def style_of(method: str) -> Style:
    """The method's style; a method that is not in the table has a lasting one too."""
    return STYLES.get(method) or _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]
