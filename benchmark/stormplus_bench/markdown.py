"""Markdown that commands write: tables, and sections between markers in a page."""

from __future__ import annotations

import html
import textwrap

import pandas as pd  # type: ignore[import-untyped, unused-ignore]


def markers(name: str) -> tuple[str, str]:
    """The two lines between which a command writes the section `name`."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def section(text: str, name: str) -> str:
    """The text between its markers."""
    begin, end = markers(name)
    for marker in (begin, end):
        text = text.replace(marker, escaped(marker))  # a name must not end the section
    return f"{begin}\n\n{text.strip()}\n\n{end}"


def escaped(text: str) -> str:
    """Text from outside, without HTML that a reader of the page would run."""
    return html.escape(text, quote=False)


def replace(page: str, text: str, name: str, file: str) -> str:
    """The page with `text` in the place of what its section `name` holds.

    Raises:
        ValueError: The page does not have each marker once, in order; the message names `file`.
    """
    begin, end = markers(name)
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(
            f"{file} should have the lines {begin} and {end} once each, in this order: the "
            "results are written between them"
        )
    before, rest = page.split(begin)
    return before + section(text, name) + rest.split(end)[1]


def table(cells: pd.DataFrame, corner: str) -> str:
    """A frame of texts as a table; `corner` is the heading of its index.

    A cell may have Markdown in it, but no HTML, and nothing that would end the cell.
    """
    lines = [[corner, *cells.columns], ["---"] * (1 + len(cells.columns))]
    lines += [[name, *line] for name, line in zip(cells.index, cells.to_numpy())]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return escaped(" ".join(str(value).splitlines())).replace("|", "\\|")


def wrap(text: str, indent: str = "") -> str:
    """The text in lines of at most 96 letters."""
    lines = textwrap.wrap(
        text, 96, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)
