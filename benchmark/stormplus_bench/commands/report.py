"""`stormplus report`: tables, figures and a page from the benchmark's rows."""

import json
from pathlib import Path

import click
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from rich.console import Console

from stormplus_bench import figures, finals, page, rows, scores, tables
from stormplus_bench.interrupts import EXIT_CODES, exit_on_error

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(context_settings={"max_content_width": 96, "show_default": True}, epilog=EXIT_CODES)
@click.argument("files", metavar="ROWS...", nargs=-1, required=True, type=FILE)
@click.option("--output", type=FOLDER, default=Path("out/report"), help="The folder to write to.")
@click.option("--readme", type=FILE, multiple=True, help="A Markdown file; may be repeated.")
@click.option("--tuned", is_flag=True, help="Tables at each method's best lr, not its default.")
@click.option("--step-times", type=FILE, help="The output of `stormplus bench-step`.")
@click.option("--home", metavar="LINK", help="Where the page's link back leads.")
@click.option("--json", "style", flag_value="json", help="Print the tables as JSON.")
@click.option("--latex", "style", flag_value="latex", help="Print the tables in LaTeX.")
def report(  # noqa: PLR0917
    files: tuple[Path, ...],
    output: Path,
    readme: tuple[Path, ...],
    tuned: bool,
    step_times: Path | None,
    home: str | None,
    style: str | None,
) -> None:
    """Turn the benchmark's rows into tables, figures and a page.

    ROWS are the journals of `stormplus compare` (rows.jsonl or rows.jsonl.gz). Several are merged:
    a run in a later file replaces the same run (workload, method, lr, seed) in an earlier one.

    \b
    Written to OUTPUT:
      index.html              the report: interactive figures and all tables, in one file
      gap_at_defaults.png     a figure for print, also as SVG
      table.csv               one line per workload and method

    With --readme, each table replaces the text between the lines <!-- NAME:begin --> and
    <!-- NAME:end --> of that file. NAME is table, gap, scores, validation or results, and with
    --tuned it is tuned or tuned-validation.

    \b
    Examples:
      stormplus report out/smooth/rows.jsonl
      stormplus report rows.jsonl --json > tables.json
      stormplus report rows.jsonl more.jsonl --readme README.md
    """  # noqa: D301 - \b is click's mark for lines that must not be wrapped
    with exit_on_error(output, Console(stderr=True)):
        frame = read(files)
        times = read_step_times(step_times) if step_times else {}
        found = tables.tuned_tables(frame) if tuned else tables.all_tables(frame, times)
        blocks = {table.name: table.markdown() for table in found}
        filled = {path: tables.fill(path.read_text("utf-8"), blocks, str(path)) for path in readme}
        html = page.build(frame, [table for table in found if table.name != "table"], home)
        output.mkdir(parents=True, exist_ok=True)
        scores.results(frame).to_csv(output / "table.csv", index=False)
        (output / "index.html").write_text(html, "utf-8")
        figure = figures.gap_at_defaults(frame)
        for kind in ("png", "svg"):
            figure.savefig(output / f"gap_at_defaults.{kind}", dpi=130)
            figure.set_layout_engine("none")  # laid out once, for both formats
        for path, text in filled.items():
            path.write_text(text, "utf-8")
    shown = [table for table in found if style == "json" or table.name != "results"]
    if style is None and not tuned:
        shown = [tables.scores_table(frame)]
    click.echo(tables.printed(shown, style))
    click.echo(f"wrote {', '.join(map(str, (output, *filled)))}", err=style is not None)


def read(files: tuple[Path, ...]) -> pd.DataFrame:
    """Return the rows of all files, if they can be compared."""
    frame = rows.load(*files)
    names = ", ".join(map(str, files))
    if frame.empty:
        raise ValueError(f"{names}: no runs yet; start the benchmark")
    if not frame["default"].any():
        raise ValueError(f"{names}: no method was run at its default learning rate")
    finals.defaults(frame)  # raises if a method has two
    finals.check_budgets(frame)
    return frame


def read_step_times(path: Path) -> dict[str, float]:
    """Return the time per step over that of Adam(fused=True), by method."""
    try:
        ratios = json.loads(path.read_text())["/ Adam(fused)"]
        return {str(name): float(ratio) for name, ratio in ratios.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not an output of `stormplus bench-step`: {error!r}") from error
