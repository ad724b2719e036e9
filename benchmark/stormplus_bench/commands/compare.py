"""`stormplus compare`: run a suite, then show a table and a figure."""

from pathlib import Path

import click
from rich.console import Console

from stormplus_bench import finals, rows, tables
from stormplus_bench.engine import announce, execute
from stormplus_bench.figures import curves_grid
from stormplus_bench.interrupts import EXIT_CODES, exit_on_error
from stormplus_bench.own import TEMPLATES
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
  stormplus compare networks --dry-run      only the number of runs
  stormplus compare smooth --parallel-config dask.yml
  stormplus compare --solver my_solver.py --workload my_workload.py --seeds 3

--solver adds your optimizer to the suite's methods; with --workload they all train your model
instead of the suite's. Examples of these files are in {TEMPLATES}:
solver.py, two_gradients.py and workload.py. A workload may also have name, batch_size (by default
32) and accuracy(model, batch).

Each finished run is a row in DIR/rows.jsonl. After an interruption, repeat the command to
continue. Finished runs are not repeated: after a change in your file, give another DIR.
`stormplus report DIR/rows.jsonl` makes the report.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.argument("suite", default="quick")
@click.option("--output", metavar="DIR", help="Where rows and figures go.  [out/SUITE]")
@click.option("--method", multiple=True, help="Only this method; may be repeated.")
@click.option("--solver", multiple=True, type=FILE, help="Your optimizer's file; may be repeated.")
@click.option("--workload", multiple=True, type=FILE, help="Your model's file; may be repeated.")
@click.option("--alone", is_flag=True, help="Only your optimizers, without the suite's methods.")
@click.option("--seeds", type=AT_LEAST_ONE, help="Number of seeds, instead of the suite's.")
@click.option("--jobs", default=1, type=AT_LEAST_ONE, show_default=True, help="Runs at a time.")
@click.option("--threads", default=1, type=AT_LEAST_ONE, show_default=True, help="Threads per run.")
@click.option("--parallel-config", type=FILE, help="benchopt's file for Dask or SLURM.")
@click.option("--dry-run", is_flag=True, help="Only check the files and count the runs.")
@click.option("--json", "style", flag_value="json", help="Print the table as JSON.")
@click.option("--latex", "style", flag_value="latex", help="Print the table in LaTeX.")
@click.option("--list", "listing", is_flag=True, help="List the suites.")
def compare(  # noqa: PLR0917
    suite: str,
    output: str | None,
    method: tuple[str, ...],
    solver: tuple[Path, ...],
    workload: tuple[Path, ...],
    alone: bool,
    seeds: int | None,
    jobs: int,
    threads: int,
    parallel_config: Path | None,
    dry_run: bool,
    style: str | None,
    listing: bool,
) -> None:
    """Train workloads with STORM+ and other methods at equal gradient evaluations.

    SUITE is the name of a suite (see --list) or a file with a benchopt run configuration.
    """
    if listing:
        for name, path in suites().items():
            click.echo(f"{name:15s} {path.read_text().splitlines()[0].lstrip('# ')}")
        return
    if alone and not solver:
        raise click.UsageError("--alone needs your optimizer: give --solver FILE")
    folder = Path(output or f"out/{Path(suite).stem}")
    journal, messages = folder / "rows.jsonl", Console(stderr=True)
    with exit_on_error(journal, messages):
        config = with_own(read_suite(suite), solver, workload, seeds, alone=alone)
        plan = make_plan(config, method)
        announce(plan, journal, messages)
        if not plan.runs:
            raise ValueError("nothing to run: see the reasons above")
        if dry_run:
            return
        execute(plan, journal, jobs=jobs, threads=threads, parallel_config=parallel_config)
        frame = rows.load(journal)
        frame = frame[frame["workload"].isin({run.workload for run in plan.runs})]
        has_defaults = frame["default"].any()
        many = frame["workload"].nunique() > FEW and has_defaults
        table = tables.scores_table(frame) if many else tables.losses_table(frame)
        click.echo(tables.printed([table], style))
        ends = finals.defaults(frame) if has_defaults else finals.tuned(frame)
        curves_grid(frame, ends).savefig(folder / "curves.png", dpi=150)
        messages.print(f"figure: {folder / 'curves.png'}   rows: {journal}", markup=False)
