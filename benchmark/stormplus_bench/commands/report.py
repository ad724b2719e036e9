"""`stormplus report`: the page, the figures and README's results, from rows."""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stormplus.files import require_writable, write_whole
from stormplus.interrupts import explained
from stormplus.progress import Pulse
from stormplus_bench import figures, finals, markdown, page, rows, scores, sentences
from stormplus_bench.methods import few, in_figures
from stormplus_bench.svg import to_svg

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
WRITTEN = ("index.html", "table.csv", "results.md")
LONGEST = 100  # letters of a file's name; file systems allow some 250 bytes


@click.command(context_settings={"max_content_width": 96})
@click.argument("files", metavar="ROWS...", nargs=-1, required=True, type=FILE)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/report"),
    show_default=True,
    help="The folder to write to; it is made if it is not there.",
)
@click.option("--readme", type=FILE, help="A Markdown file whose results section is replaced.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for the figures that README shows.  [OUTPUT/figures]",
)
def report(files: tuple[Path, ...], output: Path, readme: Path | None, keep: Path | None) -> None:
    """Turn the benchmark's rows into a page, figures, a table and a summary.

    ROWS are journals that the benchmark has written (rows.jsonl, or rows.jsonl.gz). Several are
    read as one: a run in a later file replaces the same run (workload, method, lr, seed) of an
    earlier one.

    \b
    OUTPUT then has
      index.html    the report, one file that opens without a network
      figures/      each figure as SVG, the overviews as PNG too
      table.csv     one line for each workload and method
      results.md    what README says: where STORM+ wins, ties and loses

    With --readme the same text replaces what stands between the lines
    <!-- results:begin --> and <!-- results:end --> of that file.

    \b
    Examples
      stormplus report out/smooth/rows.jsonl
      stormplus report rows.jsonl more.jsonl --output docs/benchmark --readme README.md

    \b
    Exit codes
      0    all files were written
      1    ROWS cannot be used (empty, damaged, another version), README has no markers, or a
           file cannot be written
      2    the command was not called properly

    A last line that is cut short, because the benchmark was stopped while it wrote, is left out
    with a warning.
    """  # noqa: D301 - click's own mark: leave these lines as they are
    console = Console(stderr=True)
    with explained(output, console):
        frame = read(files)
        if readme:
            _in_readme(readme, "")
            require_writable(readme.parent)
        require_writable(output / "figures")
        require_writable(output, WRITTEN)
        if keep:
            require_writable(keep)
        found = sentences.findings(frame)
        written = write(frame, found, files, output, readme, keep, console)
    for text in found.plain():
        click.echo(text)
    click.echo("wrote " + ", ".join(str(path) for path in written))


def read(files: tuple[Path, ...]) -> pd.DataFrame:
    """The rows of all files; what is cut short is left out, with a warning."""
    frame = rows.load_all(files, on_cut=_warn)
    if frame.empty:
        raise ValueError(f"{', '.join(map(str, files))}: no run in there yet; start the benchmark")
    if not frame["default"].any():
        raise ValueError(
            f"{', '.join(map(str, files))}: no run is marked as its method's default, which the "
            "report compares; run the benchmark with the default learning rates"
        )
    finals.defaults(frame)  # raises if there are two for one method
    finals.check_budgets(frame)
    return frame


def _warn(path: Path, number: int) -> None:
    click.echo(
        f"Warning: {path}, line {number} is cut short and left out: the benchmark was stopped "
        "while it wrote; continue it to have this run too",
        err=True,
    )


def write(  # noqa: PLR0917
    frame: pd.DataFrame,
    found: sentences.Findings,
    files: tuple[Path, ...],
    output: Path,
    readme: Path | None,
    keep: Path | None,
    console: Console,
) -> list[Path]:
    """Write everything; the README last, when nothing can go wrong any more."""
    folder = output / "figures"
    svgs = draw(frame, folder, console)
    write_whole(output / "index.html", page.build(frame, found, svgs))
    write_whole(output / "table.csv", scores.table(frame).to_csv(index=False))
    command = f"stormplus report {' '.join(path.as_posix() for path in files)}"
    command += f" --output {output.as_posix()}"
    section = markdown.section(
        sentences.readme_section(found, "figures", command), sentences.SECTION
    )
    write_whole(output / "results.md", section + "\n")
    written = [output / name for name in ("index.html", "figures", "table.csv", "results.md")]
    if readme is None:
        return written
    command += f" --readme {readme.as_posix()}"
    if keep is not None:
        command += f" --keep {keep.as_posix()}"
    shown = Path(os.path.relpath(keep or folder, readme.parent)).as_posix()
    section = sentences.readme_section(found, shown, command)
    if keep is not None:
        names = re.findall(r"\]\(.*?([\w-]+\.png)\)", section)
        written += [write_whole(keep / name, (folder / name).read_bytes()) for name in names]
    return [*written, write_whole(readme, _in_readme(readme, section))]


def draw(frame: pd.DataFrame, folder: Path, console: Console) -> dict[str, str]:
    """Write each figure as SVG, and the overviews as PNG too; return the SVG texts by name."""
    svgs = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    pulse, drawings = Pulse(console), _drawings(frame)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("drawing", total=len(drawings))
        for number, (name, (make, overview)) in enumerate(drawings.items()):
            figure = make()
            svgs[name] = to_svg(figure, f"f{number}")
            write_whole(folder / f"{file_name(name)}.svg", svgs[name])
            if overview:
                picture = io.BytesIO()
                figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
                write_whole(folder / f"{file_name(name)}.png", picture.getvalue())
            progress.advance(task)
            pulse.beat(f"{number + 1}/{len(drawings)} figures drawn")
    return svgs


def file_name(name: str) -> str:
    """A figure's name as a file's; one that had to be changed ends with a number of its own."""
    short = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:LONGEST]
    return short if short == name else f"{short}-{zlib.crc32(name.encode()):08x}"


def _in_readme(readme: Path, section: str) -> str:
    """README's text with another section on the results; a ValueError if it has no markers."""
    old = readme.read_text(encoding="utf-8")
    return markdown.replace(old, section, sentences.SECTION, str(readme))


def _drawings(frame: pd.DataFrame) -> dict[str, tuple[Callable[[], Figure], bool]]:
    """Name -> how to draw it, and whether it is an overview."""
    table: dict[str, tuple[Callable[[], Figure], bool]] = {
        "cost_of_not_tuning": (partial(figures.cost_of_not_tuning, frame), True),
        "performance_profile": (partial(figures.performance_profile, frame), True),
    }
    for part, names in in_figures(frame["workload"]).items():
        some: dict[str, Any] = {"methods": few(frame["method"]) or None, "workloads": names}
        table |= {
            f"curves-default-{part}": (partial(figures.curves_grid, frame, **some), True),
            f"curves-tuned-{part}": (
                partial(figures.curves_grid, frame, best_lr=True, **some),
                True,
            ),
            f"sensitivity-{part}": (partial(figures.sensitivity_grid, frame, **some), True),
        }
    for workload in sorted(frame["workload"].unique()):
        table[f"curves_{workload}"] = (partial(figures.curves, frame, workload), False)
        table[f"sensitivity_{workload}"] = (partial(figures.sensitivity, frame, workload), False)
    return table
