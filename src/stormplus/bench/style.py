"""One look for each method, the same in every picture.

Colour says the family, dash and marker the member, so that the lines can be told apart by
people who see few colours, and on a grey print. The colours are those of Okabe and Ito
(2008), without their yellow, which is too light for a line on white, and with a dark grey; a
lighter one would look like their green or purple to some.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

VERMILLION, ORANGE, PURPLE, BLACK = "#D55E00", "#E69F00", "#CC79A7", "#000000"
BLUE, SKY, GREEN, GREY = "#0072B2", "#56B4E9", "#009E73", "#555555"

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


_OURS = 2.2  # the subject of the pictures has the thicker lines
STYLES = {
    "STORM+": Style(VERMILLION, SOLID, "o", _OURS),
    "STORM+ mean": Style(VERMILLION, DASHED, "s", _OURS),
    "Untuned": Style(VERMILLION, DASH_DOT, "*", _OURS),
    "simplified STORM+": Style(ORANGE, SOLID, "^", _OURS),
    "simplified STORM+ mean": Style(ORANGE, DASHED, "v", _OURS),
    "STORM": Style(PURPLE, SOLID, "D"),
    "STORM mean": Style(PURPLE, DASHED, "d"),
    "SGD": Style(BLACK, SOLID, "x"),
    "SGD momentum": Style(BLACK, DASHED, "+"),
    "Adam": Style(BLUE, SOLID, "P"),
    "AdamW": Style(BLUE, DASHED, "X"),
    "AdaGrad": Style(SKY, SOLID, "<"),
    "RMSprop": Style(SKY, DASHED, ">"),
    "Schedule-Free": Style(GREEN, SOLID, "p"),
    "Prodigy": Style(GREEN, DASHED, "h"),
    "DoG": Style(GREEN, DOTTED, "8"),
    "D-Adaptation": Style(GREEN, DASH_DOT, "1"),
    "Mechanic": Style(GREEN, LONG, "2"),
    "MARS": Style(GREY, SOLID, "3"),
    "SVRG": Style(GREY, DASHED, "4"),
}
OURS = tuple(name for name in STYLES if "STORM+" in name)

_SPARE = [
    Style(colour, dash, marker)
    for colour in (GREY, BLACK, BLUE, GREEN, PURPLE, SKY)
    for dash, marker in ((DOTTED, "H"), (DASH_DOT, "|"), (LONG, "_"))
]


def style_of(method: str) -> Style:
    """The method's style; a label that is not in the table has a lasting one too."""
    return STYLES.get(method) or _SPARE[zlib.crc32(method.encode()) % len(_SPARE)]


def ordered(methods: Iterable[str]) -> list[str]:
    """The methods once each, in the table's order; others follow by name."""
    ranks = {name: rank for rank, name in enumerate(STYLES)}
    return sorted(set(methods), key=lambda name: (ranks.get(name, len(ranks)), name))
