"""`stormplus report`: the page, the figures and README's results, from rows."""

from __future__ import annotations

import io
import json
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
@click.option(
    "--readme",
    "pages",
    type=FILE,
    multiple=True,
    help="A Markdown file whose sections are replaced; may be given several times.",
)
@click.option(
    "--step-times",
    type=FILE,
    help="What benchmark/scripts/step_time.py has measured, for README's table.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for the figures that these files show.  [OUTPUT/figures]",
)
def report(
    files: tuple[Path, ...],
    output: Path,
    pages: tuple[Path, ...],
    step_times: Path | None,
    keep: Path | None,
) -> None:
    """Turn the benchmark's rows into a page, figures, a table and a summary.

    ROWS are journals that the benchmark has written (rows.jsonl, or rows.jsonl.gz). Several are
    read as one: a run in a later file replaces the same run (workload, method, lr, seed) of an
    earlier one.

    \b
    OUTPUT then has
      index.html    the report, one file that opens without a network
      figures/      each figure as SVG, the overviews as PNG too
      table.csv     one line for each workload and method
      results.md    the same in words: where STORM+ wins, ties and loses

    With --readme the same words replace what stands between the lines
    <!-- results:begin --> and <!-- results:end --> of that file, and a short table of the methods
    that people use what stands between <!-- table:begin --> and <!-- table:end -->.

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
        times = read_step_times(step_times) if step_times else {}
        for name in pages:
            in_page(name, "", "")
            require_writable(name.parent)
        require_writable(output / "figures")
        require_writable(output, WRITTEN)
        if keep:
            require_writable(keep)
        found = sentences.findings(frame)
        command = shown_command(files, output, pages, step_times, keep)
        written = write(frame, found, command, output, console)
        written += fill(pages, found, times, command, output, keep)
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


def read_step_times(path: Path) -> dict[str, float]:
    """Time of a step over that of Adam(fused=True), by method."""
    try:
        return {
            str(name): float(ratio)
            for name, ratio in json.loads(path.read_text())["/ Adam(fused)"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is not what benchmark/scripts/step_time.py writes ({error!r}); run it again"
        ) from error


def shown_command(
    files: tuple[Path, ...],
    output: Path,
    pages: tuple[Path, ...],
    step_times: Path | None,
    keep: Path | None,
) -> str:
    """How this report was called."""
    parts = ["stormplus report", *(path.as_posix() for path in files)]
    parts.append(f"--output {output.as_posix()}")
    parts += [f"--readme {path.as_posix()}" for path in pages]
    parts += [f"--step-times {step_times.as_posix()}"] if step_times else []
    parts += [f"--keep {keep.as_posix()}"] if keep else []
    return " ".join(parts)


def write(
    frame: pd.DataFrame, found: sentences.Findings, command: str, output: Path, console: Console
) -> list[Path]:
    """Write all that goes to the folder."""
    svgs = draw(frame, output / "figures", console)
    write_whole(output / "index.html", page.build(frame, found, svgs))
    write_whole(output / "table.csv", scores.table(frame).to_csv(index=False))
    section = markdown.section(
        sentences.results_section(found, "figures", command), sentences.SECTION
    )
    write_whole(output / "results.md", section + "\n")
    return [output / name for name in ("index.html", "figures", "table.csv", "results.md")]


def fill(  # noqa: PLR0917
    pages: tuple[Path, ...],
    found: sentences.Findings,
    times: dict[str, float],
    command: str,
    output: Path,
    keep: Path | None,
) -> list[Path]:
    """Write the sections of the pages, last, when nothing can go wrong any more."""
    folder, written = output / "figures", []
    table = sentences.readme_table(found, times)
    for name in pages:
        shown = Path(os.path.relpath(keep or folder, name.parent)).as_posix()
        text = in_page(name, sentences.results_section(found, shown, command), table)
        if keep is not None:
            figures_shown = re.findall(rf"\]\({re.escape(shown)}/([\w-]+\.png)\)", text)
            drawn = [figure for figure in figures_shown if (folder / figure).exists()]
            written += [
                write_whole(keep / figure, (folder / figure).read_bytes()) for figure in drawn
            ]
        written.append(write_whole(name, text))
    return written


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


def in_page(name: Path, results: str, table: str) -> str:
    """The page's text with other sections; a ValueError if it has neither."""
    text = name.read_text(encoding="utf-8")
    begin, _ = markdown.markers(sentences.TABLE)
    if begin in text:
        text = markdown.replace(text, table, sentences.TABLE, str(name))
        if markdown.markers(sentences.SECTION)[0] not in text:
            return text
    return markdown.replace(text, results, sentences.SECTION, str(name))


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
