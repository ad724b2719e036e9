"""`stormplus paper`: ResNet34 on CIFAR-10, as in the paper's appendix."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import click
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from rich.console import Console

from stormplus.interrupts import EXIT_CODES, explained
from stormplus_bench import course, rows
from stormplus_bench.commands.compare import JOBS, THREADS
from stormplus_bench.course import COURSES, METHODS, Course
from stormplus_bench.data import VARIABLE
from stormplus_bench.engine import announce, execute
from stormplus_bench.paper import SCALES, SOLVERS, Scale, extension, long_runs, sweep, write
from stormplus_bench.plan import make_plan

EXAMPLES = f"""\b
Scales (ResNet34 at each of them):
  full   50,000 images, 100,000 gradient evaluations a method: for a GPU
  cpu    the sweep on 10,000 images, 300 evaluations a run; then 50,000 images, 1,000
  smoke  one minute, to see that it runs
  course        to the end, on 1,000 images: 100 epochs of every method
  course-smoke  two epochs of it on 200 images

\b
Examples:
  stormplus data cifar10 --data-dir ~/data
  STORMPLUS_DATA=~/data stormplus paper                 everything, on a GPU
  STORMPLUS_DATA=~/data stormplus paper --scale cpu --jobs 2
  STORMPLUS_DATA=~/data stormplus paper --scale course --jobs 2 --output out/course
  stormplus paper --scale course --output out/course --method Adam --method STORM+
  stormplus paper --scale cpu --redraw                  the figures again, from the rows

Interrupt at will: each finished run is in OUTPUT/rows.jsonl, and the same command goes on.
A run of the course goes on from its last measurement: OUTPUT/rows.parts has its state.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--scale",
    type=click.Choice([*SCALES, *COURSES]),
    default="full",
    show_default=True,
    help="How much of it, see below.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="out/paper",
    show_default=True,
    help="Where rows, figures and tables go.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    type=click.Choice(list(METHODS)),
    help="Of the course, only this one; may be given several times.",
)
@click.option("--data-dir", help=f"Where CIFAR-10 is.  [${VARIABLE}]")
@JOBS
@THREADS
@click.option("--redraw", is_flag=True, help="Draw what OUTPUT holds; run nothing.")
def paper(  # noqa: PLR0917
    scale: str,
    output: Path,
    methods: tuple[str, ...],
    data_dir: str | None,
    jobs: int,
    threads: int,
    redraw: bool,
) -> None:
    """Run the paper's experiment: SGD with momentum, AdaGrad, Adam, STORM, STORM+.

    First a sweep of the learning rate over one range for every method (a best rate at an end
    extends it), then a long run of each at its best. Writes the paper's four panels against
    epochs and against gradient evaluations, a table, and what was seen of the paper's claims.
    """
    console = Console()
    if methods and scale not in COURSES:
        raise click.UsageError(f"--method goes with --scale {' or '.join(COURSES)}, got {scale}")
    if data_dir:
        os.environ[VARIABLE] = data_dir
    journal = output / "rows.jsonl"
    with explained(journal, console):
        if scale in COURSES:
            if not redraw:
                run_course(COURSES[scale], journal, methods or METHODS, jobs, threads, console)
            written = course.write(journal, COURSES[scale], output)
        else:
            if not redraw:
                run_stages(SCALES[scale], journal, jobs, threads, console)
            written = write(journal, SCALES[scale], output)
        for file in written:
            console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)


def run_stages(scale: Scale, journal: Path, jobs: int, threads: int, console: Console) -> None:
    """The sweep, its extensions, the long runs; each goes on where it was left."""
    stage = partial(run_stage, journal=journal, jobs=jobs, threads=threads, console=console)
    long = [key for key in rows.keys(journal) if key[0] == scale.long_name]
    later = (len(SOLVERS) - len(long)) * scale.evaluations
    stage("sweep", sweep(scale), later=max(0, later))
    while (more := extension(scale, done(journal))) is not None:
        stage("the best rate is at an end: one rate more", more)
    stage("long runs at the best rates", long_runs(scale, done(journal)))


def run_course(  # noqa: PLR0917
    plan: Course,
    journal: Path,
    methods: Collection[str],
    jobs: int,
    threads: int,
    console: Console,
) -> None:
    """What is to be run next, until there is nothing more; goes on where it was left."""
    while (following := course.stage(plan, done(journal), methods)) is not None:
        run_stage(*following, journal=journal, jobs=jobs, threads=threads, console=console)


def run_stage(
    name: str,
    config: dict[str, Any],
    *,
    journal: Path,
    jobs: int,
    threads: int,
    console: Console,
    later: int = 0,
) -> None:
    """Run what the journal does not have of a configuration; `later` evaluations follow it."""
    console.print(f"[bold]{name}[/]")
    plan = make_plan(config, threads)
    if plan.skipped:
        raise ValueError(next(iter(plan.skipped.values())))
    announce(plan, journal, jobs, console)
    if later:  # the network and the batch are the same, and so is a gradient's price
        minutes = later * max(plan.seconds.values()) / jobs / 60
        console.print(f"then the long runs: {minutes:.1f} minutes", highlight=False)
    execute(plan, journal, jobs=jobs, threads=threads, console=console)


def done(journal: Path) -> pd.DataFrame:
    """The runs that are there; what was cut is run again."""
    if not rows.keys(journal):
        return rows.frame_of([])
    return rows.load(journal, on_cut="drop")
