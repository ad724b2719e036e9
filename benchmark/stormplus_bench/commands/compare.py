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

from stormplus.files import write_whole
from stormplus.interrupts import EXIT_CODES, explained
from stormplus_bench import finals, rows, sentences
from stormplus_bench.engine import announce, execute
from stormplus_bench.methods import NO_RATE, ordered
from stormplus_bench.own import SOLVER, WORKLOAD
from stormplus_bench.plan import Plan, check_unchanged, make_plan, read_suite, suites, with_own

AT_LEAST_ONE = click.IntRange(min=1)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
JOBS = click.option(
    "--jobs", default=1, type=AT_LEAST_ONE, show_default=True, help="Runs side by side."
)
THREADS = click.option(
    "--threads", default=1, type=AT_LEAST_ONE, show_default=True, help="Threads of each run."
)
FEW = 3  # workloads: with no more of them, the table at the end has a line for each method on each

EXAMPLES = f"""\b
Examples:
  stormplus compare                         two embedded workloads, about a minute
  stormplus compare --list                  the suites and what they hold
  stormplus compare smooth --jobs 2         the whole tier of smooth problems
  stormplus compare networks --dry-run      only the projected total
  stormplus compare smooth --parallel-config dask.yml
  stormplus compare --solver my_solver.py --workload my_workload.py --seeds 3

\b
{SOLVER}

\b
{WORKLOAD}

With --solver your optimizer joins the suite's methods; with --workload they all train your
model instead of the suite's.

Each finished run is a row in DIR/rows.jsonl. Interrupt at will: the same command goes on
where it was left. `stormplus report DIR/rows.jsonl` makes the page.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.argument("suite", default="quick")
@click.option("--output", metavar="DIR", help="Where rows and figures go.  [out/SUITE]")
@click.option(
    "--solver",
    "solvers",
    multiple=True,
    type=FILE,
    help="A Python file with an optimizer of your own; may be repeated.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=FILE,
    help="A Python file with a model of your own; may be repeated.",
)
@click.option("--alone", is_flag=True, help="Only your optimizers, without the suite's methods.")
@click.option("--seeds", type=AT_LEAST_ONE, help="So many seeds, instead of the suite's.")
@JOBS
@THREADS
@click.option(
    "--parallel-config",
    type=FILE,
    help="benchopt's file for Dask or SLURM.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run and how long it would take.")
@click.option("--list", "listing", is_flag=True, help="List the suites.")
def compare(  # noqa: PLR0917
    suite: str,
    output: str | None,
    solvers: tuple[Path, ...],
    workloads: tuple[Path, ...],
    alone: bool,
    seeds: int | None,
    jobs: int,
    threads: int,
    parallel_config: Path | None,
    dry_run: bool,
    listing: bool,
) -> None:
    """Train workloads with STORM+ and its rivals at equal gradient evaluations.

    SUITE is the name of a suite (`--list`) or a benchopt run configuration of your own.
    """
    console = Console()
    if listing:
        for name, path in suites().items():
            console.print(f"[bold]{name}[/]: {path.read_text().splitlines()[0].lstrip('# ')}")
        return
    if alone and not solvers:
        raise click.UsageError("--alone needs an optimizer of yours: give --solver FILE")
    folder = Path(output or f"out/{Path(suite).stem}")
    journal = folder / "rows.jsonl"
    with explained(journal, console):
        config = with_own(read_suite(suite), solvers, workloads, seeds, alone=alone)
        plan = make_plan(config, threads)
        check_unchanged(journal, solvers, workloads)
        announce(plan, journal, None if parallel_config else jobs, console)
        if not plan.runs:
            raise ValueError("nothing to run: see the reasons above")
        if dry_run:
            return
        execute(plan, journal, jobs=jobs, threads=threads, parallel_config=parallel_config)
        show(journal, plan, folder, console)


def show(journal: Path, plan: Plan, folder: Path, console: Console) -> None:
    """The results as a table, the curves as a figure."""
    from stormplus_bench.figures import curves_grid

    wanted = {run.workload for run in plan.runs}
    frame = rows.load(journal, on_cut="drop")
    frame = frame[frame["workload"].isin(wanted)]
    console.print(table_of(frame))
    drawn = io.BytesIO()
    # A suite without any default shows each method at its best instead.
    curves_grid(frame, best_lr=not frame["default"].any()).savefig(drawn, format="png", dpi=150)
    picture = write_whole(folder / "curves.png", drawn.getvalue())
    console.print(f"figure: {picture}   rows: {journal}", highlight=False, markup=False)


def table_of(frame: pd.DataFrame) -> Table:
    """Final losses of a few workloads, scores over many: either fits a terminal."""
    many = frame["workload"].nunique() > FEW and frame["default"].any()
    return score_table(frame) if many else final_table(frame)


def score_table(frame: pd.DataFrame) -> Table:
    """What each method loses without tuning, and how often it is among the fastest."""
    table = Table(
        title=f"{frame['workload'].nunique()} workloads, the least costly method first",
        caption="`stormplus report` shows each workload",
    )
    found = sentences.score_table(frame)
    table.add_column("method")
    for name in found.columns:
        table.add_column(name, justify="right")
    for method, *cells in found.itertuples(name=None):
        table.add_row(escape(method), *cells)
    return table


def final_table(frame: pd.DataFrame) -> Table:
    """Final training losses: each method at its default and, where others were run, at its best."""
    seeds = " (median over seeds)" if frame["seed"].nunique() > 1 else ""
    table = Table("method", title=f"final training loss{seeds}")
    for name in ("default", "best", "at lr"):
        table.add_column(name, justify="right")
    at_default = _lookup(finals.defaults(frame))
    at_best = _lookup(finals.tuned(frame))
    for workload, part in frame.groupby("workload", sort=True):
        table.add_row(f"[bold]{escape(workload)}[/]")
        methods = ordered(part["method"].unique())
        lowest = min(at_best[workload, method][0] for method in methods)
        for method in methods:
            default, _ = at_default.get((workload, method), (math.nan, math.nan))
            best, lr = at_best[workload, method]
            text = f"[bold]{_number(best)}[/]" if best == lowest else _number(best)
            table.add_row(
                f"  {escape(method)}",
                _number(default),
                text,
                f"{lr:g}" if math.isfinite(best) and method not in NO_RATE else "",
            )
        table.add_section()
    return table


def _lookup(ends: pd.DataFrame) -> dict[tuple[str, str], tuple[float, float]]:
    columns = ("workload", "method", "loss", "lr")
    return {(w, m): (loss, lr) for w, m, loss, lr in ends[list(columns)].itertuples(index=False)}


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "diverged" if math.isinf(value) else f"{value:.4g}"
