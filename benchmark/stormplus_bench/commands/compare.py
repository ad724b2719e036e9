"""`stormplus compare`: run a suite, then show a table and a figure."""

from __future__ import annotations

import io
import math
from pathlib import Path

import click
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stormplus_bench import finals, rows
from stormplus_bench.engine import announce, execute
from stormplus_bench.files import write_whole
from stormplus_bench.interrupts import EXIT_CODES, explained
from stormplus_bench.methods import NO_RATE, ordered
from stormplus_bench.own import SOLVER, TEMPLATES, WORKLOAD
from stormplus_bench.plan import make_plan, read_suite, suites, with_own

AT_LEAST_ONE = click.IntRange(min=1)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FEW = 3  # workloads: up to here the table has a line per method and workload

EXAMPLES = f"""\b
Examples:
  stormplus compare                         two embedded workloads, about a minute
  stormplus compare --list                  the suites
  stormplus compare smooth --jobs 2         all smooth problems
  stormplus compare smooth --method STORM+ --method adam
  stormplus compare networks --dry-run      only the estimated time
  stormplus compare smooth --parallel-config dask.yml
  stormplus compare --solver my_solver.py --workload my_workload.py --seeds 3

\b
{SOLVER}

\b
{WORKLOAD}

--solver adds your optimizer to the suite's methods; with --workload they all train your model
instead of the suite's. Examples of these files, also of a solver with two gradients per step,
are in {TEMPLATES}.

Each finished run is a row in DIR/rows.jsonl. After an interruption, repeat the command to
continue. Finished runs are not repeated: after a change in your file, give another DIR.
`stormplus report DIR/rows.jsonl` makes the report.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.argument("suite", default="quick")
@click.option("--output", metavar="DIR", help="Where rows and figures go.  [out/SUITE]")
@click.option("--method", "methods", multiple=True, help="Only this method; may be repeated.")
@click.option(
    "--solver",
    "solvers",
    multiple=True,
    type=FILE,
    help="A Python file with your optimizer; may be repeated.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=FILE,
    help="A Python file with your model; may be repeated.",
)
@click.option("--alone", is_flag=True, help="Only your optimizers, without the suite's methods.")
@click.option("--seeds", type=AT_LEAST_ONE, help="Number of seeds, instead of the suite's.")
@click.option("--jobs", default=1, type=AT_LEAST_ONE, show_default=True, help="Runs at a time.")
@click.option("--threads", default=1, type=AT_LEAST_ONE, show_default=True, help="Threads per run.")
@click.option("--parallel-config", type=FILE, help="benchopt's file for Dask or SLURM.")
@click.option("--dry-run", is_flag=True, help="Only print the estimated time.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "latex"]),
    default="text",
    show_default=True,
    help="How to print the table.",
)
@click.option("--list", "listing", is_flag=True, help="List the suites.")
def compare(  # noqa: PLR0917
    suite: str,
    output: str | None,
    methods: tuple[str, ...],
    solvers: tuple[Path, ...],
    workloads: tuple[Path, ...],
    alone: bool,
    seeds: int | None,
    jobs: int,
    threads: int,
    parallel_config: Path | None,
    dry_run: bool,
    style: str,
    listing: bool,
) -> None:
    """Train workloads with STORM+ and other methods at equal gradient evaluations.

    SUITE is the name of a suite (see --list) or a file with a benchopt run configuration.
    """
    if listing:
        for name, path in suites().items():
            click.echo(f"{name:15s} {path.read_text().splitlines()[0].lstrip('# ')}")
        return
    if alone and not solvers:
        raise click.UsageError("--alone needs your optimizer: give --solver FILE")
    folder = Path(output or f"out/{Path(suite).stem}")
    journal, messages = folder / "rows.jsonl", Console(stderr=True)
    with explained(journal, messages):
        config = with_own(read_suite(suite), solvers, workloads, seeds, alone=alone)
        plan = make_plan(config, threads, methods)
        announce(plan, journal, jobs, messages)
        if not plan.runs:
            raise ValueError("nothing to run: see the reasons above")
        if dry_run:
            return
        execute(plan, journal, jobs=jobs, threads=threads, parallel_config=parallel_config)
        frame = rows.load(journal, on_cut="drop")
        frame = frame[frame["workload"].isin({run.workload for run in plan.runs})]
        show(frame, style)
        messages.print(f"figure: {draw(frame, folder)}   rows: {journal}", markup=False)


def draw(frame: pd.DataFrame, folder: Path) -> Path:
    """Write the curves, of each method at its default or, if there is none, its best rate."""
    from stormplus_bench.figures import curves_grid

    drawn = io.BytesIO()
    curves_grid(frame, best_lr=not frame["default"].any()).savefig(drawn, format="png", dpi=150)
    return write_whole(folder / "curves.png", drawn.getvalue())


def show(frame: pd.DataFrame, style: str = "text") -> None:
    """Print the final losses on a few workloads, or scores over many of them."""
    many = frame["workload"].nunique() > FEW and frame["default"].any()
    table = scores_table(frame) if many else losses_table(frame)
    if style == "json":
        click.echo(table.to_json(orient="records", indent=1))
    elif style == "latex":
        click.echo(table.to_latex(index=False, float_format="%.4g", na_rep="", escape=True))
    else:
        Console().print(_as_text(table))


def losses_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Final training losses of each method at its default and at its best rate."""
    at = {
        name: ends.set_index(["workload", "method"])
        for name, ends in (("default", finals.defaults(frame)), ("best", finals.tuned(frame)))
    }
    lines = []
    for workload, part in frame.groupby("workload", sort=True):
        for method in ordered(part["method"].unique()):
            losses = {name: ends["loss"].get((workload, method)) for name, ends in at.items()}
            lr = None if method in NO_RATE else at["best"]["lr"][workload, method]
            lines.append({"workload": workload, "method": method, **losses, "lr of best": lr})
    return pd.DataFrame(lines)


def scores_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The gap at defaults of each method, and how often it is among the fastest."""
    from stormplus_bench import tables

    table: pd.DataFrame = tables.scores_table(frame).text().reset_index()
    return table


def _as_text(table: pd.DataFrame) -> Table:
    shown = Table(title=None if "default" not in table else "final training loss")
    for name in table.columns:
        shown.add_column(name, justify="left" if name in ("workload", "method") else "right")
    before = None
    for line in table.itertuples(index=False, name=None):
        if table.columns[0] == "workload" and line[0] != before:
            before = line[0]
            if shown.rows:
                shown.add_section()
        elif table.columns[0] == "workload":
            line = ("", *line[1:])  # noqa: PLW2901
        shown.add_row(*map(_cell, line))
    return shown


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else escape(str(value))
    if math.isnan(value):
        return ""
    return "diverged" if math.isinf(value) else f"{value:.4g}"
