"""What the site has beyond the pages of `docs/`: examples, commands' help, mathematics, a report.

The pages are written to be read in the repository too, where `../examples/ddp.py` is a file.
On the site each example is a page made from that file, and links to it are turned round.
Formulas between dollars become MathML, which browsers set without a script or a network.
The cells of tables that are maps are coloured, so that a telephone can do without the picture.
A link to any other file of the repository is left as plain text, with a warning if a page of the
site says the same.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import click
from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import SimpleTextInlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from stormplus.theory.palette import PALETTE, shade

LOG = logging.getLogger("mkdocs.hooks")  # a warning ends a strict build
ROOT = Path(__file__).parents[2]
REPORT = ROOT / "out" / "report" / "index.html"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MATHS = re.compile(  # with the brackets and stops beside it, which belong on its line
    r'(\(?)<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\2>([).,;:]*)', re.DOTALL
)
TIGHT = re.compile(r"<mo[^>]*>(&#x0007C;|&#x0002F;)</mo>")  # | and /
SIGN = re.compile(r"(<mo[^>]*>(?:&#x0003D;|&#x00028;)</mo>)<mo>(&#x02212;)</mo>")  # = - and ( -
MAP = re.compile(
    r"(<!-- (map of costs|bar:begin|study:begin) -->\s*)(<table>.*?</table>)", re.DOTALL
)
FIGURE = re.compile(r'<img [^>]*src="([^":]+\.png)"[^>]*>')
CELL = re.compile(r"<td>(.*?)</td>")
REPORT_LINK = "<!-- the report -->"  # in the repository there is no such file
README_TABLE = "<!-- README's table -->"
COMMANDS = "<!-- the help of every command -->"


class Formulas(Extension):
    """In pages and in docstrings alike the underscore of `g~_t` begins no emphasis."""

    def extendMarkdown(self, md: Markdown) -> None:
        priority = 75  # after code (190), before emphasis (60)
        md.inlinePatterns.register(SimpleTextInlineProcessor(r"(~_)"), "g_tilde", priority)


def on_config(config: MkDocsConfig) -> None:
    config.markdown_extensions.append(Formulas())  # type: ignore[arg-type]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix not in (".py", ".ipynb"):
            continue
        text = example_page(path) if path.suffix == ".py" else notebook_page(path)
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    if REPORT.exists():
        made: dict[str, Any] = {"abs_src_path": str(REPORT)}
    else:  # a build by hand, or a test: the link to it holds all the same
        made = {"content": "<!doctype html><title>Report</title><p>`make docs` draws it here.</p>"}
    files.append(File.generated(config, "report/index.html", **made))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)
    code: list[str] = []

    def put_aside(match: re.Match[str]) -> str:
        code.append(match[0])
        return f"\0{len(code) - 1}\0"

    def turn_round(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        in_docs = posixpath.normpath(posixpath.join(here, target))
        if not in_docs.startswith("../"):
            return match[0]
        stem = posixpath.splitext(in_docs.removeprefix("../"))[0]
        if files.get_file_from_path(f"{stem}.md") is None:
            for twin in (in_docs.removeprefix("../docs/"), f"{(anchor or '#')[1:]}.md"):
                if files.get_file_from_path(twin) is not None:
                    LOG.warning(
                        "%s links to %s, which is no page of the site: link to docs/%s instead",
                        page.file.src_uri, target + (anchor or ""), twin,
                    )  # fmt: skip
            return text
        return f"[{text}]({posixpath.relpath(f'{stem}.md', here or '.')})"

    markdown = LINK.sub(turn_round, FENCED.sub(put_aside, markdown))
    markdown = re.sub(r"\0(\d+)\0", lambda match: code[int(match[1])], markdown)
    markdown = markdown.replace(REPORT_LINK, " [which is here](report/index.html),")
    if README_TABLE in markdown:
        readme = (ROOT / "README.md").read_text()
        table = readme.split("<!-- table:begin -->")[1].split("<!-- table:end -->")[0]
        markdown = markdown.replace(README_TABLE, README_TABLE + table)
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    html = MATHS.sub(mathml, html)
    html = FIGURE.sub(r'<a href="\1">\g<0></a>', html)  # at its full size, for a telephone
    html = re.sub(rf"{README_TABLE}\s*<table>", '<table data-narrow="">', html)
    return MAP.sub(lambda m: f'{m[1]}<div class="map">{coloured(m[3], m[2])}</div>', html)


def coloured(table: str, name: str) -> str:
    """A map's table with the colours of its picture: see `figures.py` of the benchmark."""
    costs = name == "map of costs"

    def cell(match: re.Match[str]) -> str:
        text = unescape(match[1])
        strength = cost(text) if costs else early(text)
        if strength is None:
            return match[0]
        ink = "white" if strength > 0.7 else "black"
        paint = shade(PALETTE["STORM+" if costs else "Adam"], strength)
        return f'<td style="background: {paint}; color: {ink}">{match[1]}</td>'

    return CELL.sub(cell, table)


def cost(text: str) -> float | None:
    """How strongly a loss in per cent is coloured: the worst most; None for a name, or no run."""
    known = {"<0.1": 0.0, ">999": 100.0, "div.": 100.0}.get(text)
    try:
        lost = float(text) if known is None else known
    except ValueError:
        return None
    return float(0.05 + 0.9 * min(max(lost / 100, 0.0), 1.0) ** 0.5)


def early(text: str) -> float | None:
    """How strongly a share of the budget is coloured: the earliest most; None where missed."""
    reached = re.fullmatch(r"<strong>([\d.]+)</strong>", text)
    return min(1.0, 1.1 - float(reached[1])) if reached else None


def mathml(match: re.Match[str]) -> str:
    """A formula that arithmatex has marked, in round brackets inline, in square ones displayed."""
    before, tag, open_, latex, after = match.groups()
    display = "inline" if open_ == "(" else "block"
    formulas = []
    for part in unescape(latex).split(r"\qquad"):  # one beside the other, or below it if narrow
        formula = convert(part, display=display)
        # A browser would put spaces around them, as if |x| were "x, given" and -x a difference.
        formula = TIGHT.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', formula)
        formulas.append(SIGN.sub(r'\1<mo form="prefix">\2</mo>', formula))
    return f'<{tag} class="maths">{before}{"".join(formulas)}{after}</{tag}>'


def example_page(path: Path) -> str:
    source = path.read_text()
    title = (ast.get_docstring(ast.parse(source)) or path.stem).splitlines()[0].rstrip(".")
    return f"# {title}\n\n`examples/{path.name}`\n\n```python\n{source}```\n"


def notebook_page(path: Path) -> str:
    """A notebook's text, code and stored output, without a notebook's scripts."""
    import nbformat

    parts: list[str] = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            data: dict[str, Any] = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output](data:image/png;base64,{data['image/png'].strip()})")
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    from stormplus.cli import main

    return "\n\n".join(help_of(main, "stormplus", None))


def help_of(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    """The help of a command, then that of each command inside it."""
    context = click.Context(
        command, parent, info_name=name, max_content_width=80, terminal_width=80
    )
    if parent is not None:
        yield f"## {context.command_path}"
    yield f"```text\n{command.get_help(context)}\n```"
    for inner in command.list_commands(context) if isinstance(command, click.Group) else ():
        try:
            found = command.get_command(context, inner)
        except click.ClickException as error:  # an extra that is not installed
            LOG.warning("stormplus %s has no help here: %s", inner, error.message)
            continue
        assert found is not None
        yield from help_of(found, inner, context)
