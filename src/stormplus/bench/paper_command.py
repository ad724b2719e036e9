"""`stormplus paper`: ResNet34 on CIFAR-10, as in the paper's appendix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from stormplus.bench import paper_plan, rows
from stormplus.bench.compare_command import AT_LEAST_ONE, announce
from stormplus.bench.data import VARIABLE
from stormplus.bench.engine import RunsFailed, execute
from stormplus.bench.paper_plan import SCALES, Scale
from stormplus.bench.paper_report import write
from stormplus.bench.plan import make_plan

EXAMPLES = """\b
Scales (ResNet34 at each of them):
  full   50,000 images, 100,000 gradient evaluations a method: for a GPU
  cpu    the sweep on 10,000 images, 100 evaluations a run; then 50,000 images, 300
  smoke  one minute, to see that it runs

\b
Examples:
  stormplus data cifar10 --folder ~/data
  STORMPLUS_DATA=~/data stormplus paper                 everything, on a GPU
  STORMPLUS_DATA=~/data stormplus paper --scale cpu --jobs 2
  stormplus paper --scale cpu --redraw                  the pictures again, from the rows

Interrupt at will: each finished run is in OUTPUT/rows.jsonl, and the same command goes on."""


@click.command(epilog=EXAMPLES)
@click.option("--scale", type=click.Choice(list(SCALES)), default="full", show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default="out/paper")
@click.option("--data-dir", help=f"Where CIFAR-10 is.  [${VARIABLE}]")
@click.option("--jobs", default=1, type=AT_LEAST_ONE, show_default=True, help="Runs side by side.")
@click.option(
    "--threads", default=1, type=AT_LEAST_ONE, show_default=True, help="Threads of each run."
)
@click.option("--redraw", is_flag=True, help="Draw what OUTPUT holds; run nothing.")
def paper(  # noqa: PLR0917
    scale: str, output: Path, data_dir: str | None, jobs: int, threads: int, redraw: bool
) -> None:
    """Run the paper's experiment: SGD with momentum, AdaGrad, Adam, STORM, STORM+.

    First a sweep of the learning rate over one range for every method (a best rate at an end
    extends it), then a long run of each at its best. Writes the paper's four panels against
    epochs and against gradient evaluations, a table, and what was seen of the paper's claims.
    """
    console = Console()
    if data_dir:
        os.environ[VARIABLE] = data_dir
    journal = output / "rows.jsonl"
    try:
        if not redraw:
            run_stages(SCALES[scale], journal, jobs, threads, console)
        for file in write(journal, SCALES[scale], output):
            console.print(f"wrote {file}", highlight=False)
    except KeyboardInterrupt:
        console.print(
            f"\nstopped; what is done is in {journal}: the same command goes on", soft_wrap=True
        )
        raise SystemExit(130) from None
    except (RunsFailed, ValueError, OSError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error


def run_stages(scale: Scale, journal: Path, jobs: int, threads: int, console: Console) -> None:
    """The sweep, its extensions, the long runs; each goes on where it was left."""

    def stage(name: str, config: dict[str, Any]) -> None:
        console.print(f"[bold]{name}[/]")
        plan = make_plan(config, threads)
        if plan.skipped:
            raise ValueError(next(iter(plan.skipped.values())))
        announce(plan, journal, jobs, console)
        execute(plan, journal, jobs=jobs, threads=threads, console=console)

    stage("sweep", paper_plan.sweep(scale))
    while (more := paper_plan.extension(scale, rows.load(journal))) is not None:
        stage("the best rate is at an end: one rate more", more)
    stage("long runs at the best rates", paper_plan.long_runs(scale, rows.load(journal)))
