"""`stormplus robust`: models that have broken an optimizer, `Untuned` and Adam(1e-3)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from stormplus import Untuned
from stormplus_bench import rows
from stormplus_bench.interrupts import EXIT_CODES, exit_on_error, interruptible
from stormplus_bench.train.robust import CASES, Case, case
from stormplus_bench.train.steppers import AtAverage, OneGradient, Stepper
from stormplus_bench.train.training import Training, row_of

OURS, THEIRS = "Untuned", "Adam"
# The rate in the rows, and the stepper.
METHODS: dict[str, tuple[float, Callable[[Training], Stepper]]] = {
    OURS: (1.0, lambda training: AtAverage(Untuned(training.parameters))),
    THEIRS: (1e-3, lambda training: OneGradient(torch.optim.Adam(training.parameters, lr=1e-3))),
}
COLUMNS = ("case", "steps", "start", "chance", OURS, "Adam(1e-3)", "lag", "verdict")
LAG = 0.1  # of Adam's decrease

EXAMPLES = f"""\b
Examples:
  stormplus robust                        every case, ten minutes
  stormplus robust --only digits          cases with this text in their name; may be repeated
  stormplus robust --list                 the cases and their steps

Each finished run is a row in DIR/rows.jsonl. After an interruption, repeat the command to
continue. Another version of the optimizer needs another DIR.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--output", metavar="DIR", default="out/robust", show_default=True, help="Where rows go."
)
@click.option("--only", multiple=True, metavar="TEXT", help="Cases with this text in their name.")
@click.option("--list", "listing", is_flag=True, help="List the cases.")
def robust(output: str, only: tuple[str, ...], listing: bool) -> None:
    """Train models that have broken an optimizer with Untuned and Adam, one line per case.

    A case is passed if the final value is finite, at most chance, and behind Adam's by at most a
    tenth of Adam's decrease. In cases without a task, the value is the distance of the
    weights from their start relative to their norm, and `chance` is its bound.
    """
    names = [name for name in CASES if not only or any(text in name for text in only)]
    if not names:
        raise click.UsageError(f"no case has {' or '.join(only)} in its name: see --list")
    if listing:
        click.echo(f"{'steps':>6s}  case")
        for name in names:
            click.echo(f"{case(name).budget:6,d}  {name}")
        return
    journal = Path(output) / "rows.jsonl"
    torch.set_num_threads(1)
    failed = []
    with exit_on_error(journal, Console(stderr=True)), interruptible():
        journal.parent.mkdir(parents=True, exist_ok=True)
        click.echo(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for name in names:
            line, passed = judge(case(name), journal)
            click.echo(line)
            failed += [] if passed else [name]
    click.echo(f"\n{len(names) - len(failed)} of {len(names)} cases passed; rows: {journal}")
    for name in failed:
        click.echo(f"failed: {name}")


def judge(workload: Case, journal: Path) -> tuple[str, bool]:
    """Run what the journal does not have; return the case's line and whether it passed."""
    done = {key[1] for key in rows.keys(journal) if key[0] == workload.name}
    for method in METHODS:
        if method not in done:
            rows.append(journal, run(workload, method))
    frame = rows.load(journal)
    losses = frame[frame["workload"] == workload.name].fillna({"train_loss": math.inf})
    ends = losses.groupby("method")["train_loss"].agg(["first", "last"])
    (start, ours), theirs = ends.loc[OURS], ends["last"][THEIRS]
    lag = math.nan if workload.walk else (ours - theirs) / max(start - theirs, 1e-12)
    passed = bool(ours <= 1.001 * workload.chance and (workload.walk or lag <= LAG))
    cells = [workload.name, f"{workload.budget:,d}"]
    cells += [f"{value:.3g}" for value in (start, workload.chance, ours, theirs)]
    cells += ["" if workload.walk else f"{lag:+.2f}", "ok" if passed else "**FAIL**"]
    return f"| {' | '.join(cells)} |", passed


def run(workload: Case, method: str) -> dict[str, Any]:
    """Return the row of one run."""
    lr, stepper = METHODS[method]
    training = Training(workload, stepper, seed=0).finish()
    return row_of(training, {"method": method, "lr": lr, "default": True})
