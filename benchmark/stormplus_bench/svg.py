"""A matplotlib figure as SVG text that can stand inside an HTML page beside others."""

from __future__ import annotations

import html
import io
import re
from collections import Counter
from itertools import count
from typing import Any

import matplotlib
from matplotlib.figure import Figure


def to_svg(figure: Figure, prefix: str) -> str:
    """A complete SVG document, the same bytes each time; its identifiers begin with `prefix`.

    Text stays text: it can be searched and selected, and the file is small. Coordinates are
    rounded to a tenth of a point.
    """
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": prefix}
    settings["font.sans-serif"] = ["DejaVu Sans"]
    buffer = io.StringIO()
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    text = re.sub(r'\b(?:d|x|y|transform)="[^"]*"', _round, text)
    text = re.sub(r"\s*\n\s*", "\n", text).replace(" \n", "\n")
    text = _classes(text)
    number = count()  # a method has the same name in each panel, an identifier must be unique
    text = re.sub(r'(\bid="m--[^"]*)"', lambda match: f'{match[1]}-{next(number)}"', text)
    # Several figures on one page must not refer to each other's markers and clips.
    return re.sub(r'(\b(?:id|class)="|href="#|url\(#|(?<=\n)\.)', rf"\g<1>{prefix}-", text)


def _round(attribute: re.Match[str]) -> str:
    short = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", attribute[0])
    return re.sub(r"(\d)\.0\b", r"\1", short)


def _classes(text: str) -> str:
    """Give a name to each style that occurs often; a third of the file is such repetitions."""
    found = Counter(re.findall(r' style="([^"]+)"', text))
    names = {style: f"c{i}" for i, (style, times) in enumerate(found.items()) if times > 2}
    for style, name in names.items():
        text = text.replace(f' style="{style}"', f' class="{name}"')
    rules = "".join(f"\n.{name}{{{style}}}" for style, name in names.items())
    return text.replace("</style>", f"{rules}\n</style>", 1)


def inline(svg: str, label: str) -> str:
    """The `<svg>` element alone, scalable, with a text for those who cannot see it."""
    element = svg[svg.index("<svg") :]
    opening, rest = element.split(">", 1)
    width = re.search(r'\swidth="([\d.]+)pt"', opening)
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", opening)
    # A page may be wider than the figure: letters should not grow beyond reason.
    limit = f' style="max-width: {1.6 * float(width[1]):.0f}px"' if width else ""
    title = html.escape(label, quote=True)
    return f'{opening}{limit} role="img" aria-label="{title}">{rest}'


def decoration(svg: str) -> str:
    """The `<svg>` element alone, hidden from screen readers."""
    return inline(svg, "").replace('role="img" aria-label=""', 'aria-hidden="true"')
