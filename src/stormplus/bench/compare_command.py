"""`stormplus compare`: run a suite, then show a table and a picture."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from stormplus.bench import rows
from stormplus.bench.engine import execute
from stormplus.bench.plan import Plan, make_plan, read_suite, suites
from stormplus.bench.running import JOBS, THREADS, announce
from stormplus.interrupts import EXIT_CODES, explained

EXAMPLES = f"""\b
Examples:
  stormplus compare                         two embedded workloads, about a minute
  stormplus compare --list                  the suites and what they hold
  stormplus compare smooth --jobs 2         the whole tier of smooth problems
  stormplus compare networks --dry-run      only the projected total
  stormplus compare smooth --parallel-config benchmark/parallel/dask.yml

Each finished run is a line in DIR/rows.jsonl. Interrupt at will: the same command goes on
where it was left. `stormplus report DIR/rows.jsonl` makes the page.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.argument("suite", default="quick")
@click.option("--output", metavar="DIR", help="Where rows and pictures go.  [out/SUITE]")
@JOBS
@THREADS
@click.option(
    "--parallel-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="benchopt's file for Dask or SLURM.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run and how long it would take.")
@click.option("--list", "listing", is_flag=True, help="List the suites.")
def compare(  # noqa: PLR0917
    suite: str,
    output: str | None,
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
    folder = Path(output or f"out/{Path(suite).stem}")
    journal = folder / "rows.jsonl"
    with explained(journal, console):
        plan = make_plan(read_suite(suite), threads)
        announce(plan, journal, None if parallel_config else jobs, console)
        if dry_run:
            return
        if not plan.runs:
            raise ValueError("nothing to run: see the reasons above")
        execute(plan, journal, jobs=jobs, threads=threads, parallel_config=parallel_config)
        show(journal, plan, folder, console)


def show(journal: Path, plan: Plan, folder: Path, console: Console) -> None:
    """The results as a table, the curves as a picture."""
    from stormplus.bench.figures import curves_grid
    from stormplus.bench.summary import table_of

    wanted = {run.workload for run in plan.runs}
    frame = rows.load(journal, on_cut="drop")
    frame = frame[frame["workload"].isin(wanted)]
    console.print(table_of(frame))
    picture = folder / "curves.png"
    # A suite without any default shows each method at its best instead.
    curves_grid(frame, best_lr=not frame["default"].any()).savefig(picture, dpi=150)
    console.print(f"figure: {picture}   rows: {journal}", highlight=False)
