"""Pages of the site that are not files in `docs/`: examples, help of the commands, the report.

The pages can also be read in the repository, where `../examples/ddp.py` is a file. On the site each
example is a page made from that file, and links to it are redirected. A link to any other file of
the repository becomes plain text.
"""

from __future__ import annotations

import ast
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "out" / "report" / "index.html"
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```)|(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(#[^)]*)?\)",
    re.MULTILINE | re.DOTALL,
)
MAP = re.compile(
    r"(<!-- (?:gap|validation|tuned|tuned-validation):begin -->\s*)(<table>.*?</table>)",
    re.DOTALL,
)
FIGURE = re.compile(r'<img [^>]*src="([^":]+\.png)"[^>]*>')
REPORT_LINK = "<!-- the report -->"  # the repository has no such file
README_TABLE = "<!-- README's table -->"
SOURCE_FACTS = ' data-md-component="source"'
COMMANDS = "<!-- the help of every command -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page per example, and the interactive report."""
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".ipynb"):
            text = script_page(path) if path.suffix == ".py" else notebook_page(path)
            files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    source: dict[str, Any] = {"content": "<!doctype html><p>Run `make docs` to draw the report."}
    if REPORT.exists():
        source = {"abs_src_path": str(REPORT)}
    files.append(File.generated(config, "report/index.html", **source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links to examples, and insert generated parts."""
    here = posixpath.dirname(page.file.src_uri)

    def redirect(match: re.Match[str]) -> str:
        target = match["target"]
        path = posixpath.normpath(posixpath.join(here, target or ""))
        if match["code"] or "://" in target or not path.startswith("../"):
            return match[0]
        twin = posixpath.splitext(path.removeprefix("../"))[0] + ".md"
        if files.get_file_from_path(twin) is None:
            return match["text"]
        return f"[{match['text']}]({posixpath.relpath(twin, here or '.')})"

    markdown = CODE_OR_LINK.sub(redirect, markdown)
    markdown = markdown.replace(REPORT_LINK, " [here](report/index.html)")
    if README_TABLE in markdown:
        readme = (ROOT / "README.md").read_text()
        table = readme.split("<!-- table:begin -->")[1].split("<!-- table:end -->")[0]
        markdown = markdown.replace(README_TABLE, table)
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep the theme from asking the repository's host for stars and releases."""
    return output.replace(SOURCE_FACTS, "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same for the page of the error 404."""
    return output_content.replace(SOURCE_FACTS, "")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link each figure to itself in full size, and let maps of methods by workloads scroll."""
    html = FIGURE.sub(r'<a href="\1">\g<0></a>', html)
    return MAP.sub(r'\1<div class="map">\2</div>', html)


def script_page(path: Path) -> str:
    source = path.read_text()
    title = (ast.get_docstring(ast.parse(source)) or path.stem).splitlines()[0].rstrip(".")
    return f"{NOT_SEARCHED}# {title}\n\n`examples/{path.name}`\n\n```python\n{source}```\n"


def notebook_page(path: Path) -> str:
    """Return a notebook's text, code and stored output."""
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
                parts.append(f"```text\n{wrapped(text)}\n```")
    return NOT_SEARCHED + "\n\n".join(parts) + "\n"


def wrapped(text: str) -> str:
    """Break the lines that no page has room for; a table keeps its lines."""
    lines = text.rstrip().splitlines()
    return "\n".join(textwrap.fill(line, 90) if len(line) > 160 else line for line in lines)


def commands() -> str:
    """Return the help of `stormplus` and of each of its commands."""
    from stormplus_bench.cli import main

    return "\n\n".join(help_of(main, "stormplus", None))


def help_of(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(command, parent, info_name=name, terminal_width=80)
    if parent is not None:
        yield f"## {context.command_path}"
    yield f"```text\n{command.get_help(context)}\n```"
    for inner in command.list_commands(context) if isinstance(command, click.Group) else ():
        found = command.get_command(context, inner)
        assert found is not None
        yield from help_of(found, inner, context)
