"""`stormplus robust`: cases that have broken an optimizer, `Untuned` beside Adam(1e-3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from stormplus import Untuned
from stormplus.interrupts import EXIT_CODES, explained, interruptible
from stormplus_bench import rows
from stormplus_bench.train.robust import CASES, Case, case
from stormplus_bench.train.steppers import AtAverage, OneGradient, Stepper
from stormplus_bench.train.training import Training, row_of

OURS, THEIRS = "Untuned", "Adam"
# The name, the rate that its rows have, and how it steps.
METHODS: dict[str, tuple[float, Callable[[Training], Stepper]]] = {
    OURS: (1.0, lambda training: AtAverage(Untuned(training.parameters))),
    THEIRS: (1e-3, lambda training: OneGradient(torch.optim.Adam(training.parameters, lr=1e-3))),
}
SEED = 0
HEADS = ("case", "steps", "start", "chance", OURS, "Adam(1e-3)", "lag", "verdict")
LAG = 0.1  # of Adam's decrease

EXAMPLES = f"""\b
Examples:
  stormplus robust                        every case, ten minutes
  stormplus robust --only digits          those whose name has the word; may be repeated
  stormplus robust --list                 the cases and their steps

Each finished run is a row in DIR/rows.jsonl. Interrupt at will: the same command goes on
where it was left. Another version of the optimizer needs another DIR.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--output", metavar="DIR", default="out/robust", show_default=True, help="Where rows go."
)
@click.option("--only", multiple=True, metavar="TEXT", help="Cases whose name has this text.")
@click.option("--list", "listing", is_flag=True, help="List the cases.")
def robust(output: str, only: tuple[str, ...], listing: bool) -> None:
    """Train what has broken an optimizer: Untuned beside Adam, one line a case.

    A case is passed if the end is finite, no worse than chance, and behind Adam by no more than a
    tenth of Adam's decrease. In the two without a task, `chance` is how far the weights may
    go, in multiples of their size.
    """
    names = [name for name in CASES if not only or any(text in name for text in only)]
    if not names:
        raise click.UsageError(f"no case has {' or '.join(only)} in its name: see --list")
    if listing:
        for name in names:
            click.echo(f"{case(name).budget:6,d}  {name}")
        return
    journal = Path(output) / "rows.jsonl"
    torch.set_num_threads(1)
    failed = []
    with explained(journal, Console(stderr=True)), interruptible():
        journal.parent.mkdir(parents=True, exist_ok=True)
        click.echo(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
        for name in names:
            line, good = judged(case(name), journal)
            click.echo(line)
            failed += [] if good else [name]
    click.echo(f"\n{len(names) - len(failed)} of {len(names)} cases passed; rows: {journal}")
    for name in failed:
        click.echo(f"failed: {name}")


def judged(workload: Case, journal: Path) -> tuple[str, bool]:
    """Run what the journal does not have, and return the case's line and whether it passed."""
    found = _ends(journal, workload)
    for method in METHODS:
        if method not in found:
            rows.append(journal, run(workload, method))
    found = _ends(journal, workload)
    (start, ours), (_, theirs) = found[OURS], found[THEIRS]
    lag = math.nan if workload.walk else (ours - theirs) / max(start - theirs, 1e-12)
    good = ours <= 1.001 * workload.chance and (workload.walk or lag <= LAG)
    cells = [workload.name, f"{workload.budget:,d}"]
    cells += [f"{value:.3g}" for value in (start, workload.chance, ours, theirs)]
    cells += ["" if workload.walk else f"{lag:+.2f}", "ok" if good else "**FAIL**"]
    return f"| {' | '.join(cells)} |", good


def run(workload: Case, method: str) -> dict[str, Any]:
    """One run, as a row."""
    lr, stepper = METHODS[method]
    training = Training(workload, stepper, SEED)
    for target in workload.checkpoints:
        training.advance(target)
        training.record()
    return row_of(training, {"method": method, "lr": lr, "default": True})


def _ends(journal: Path, workload: Case) -> dict[str, tuple[float, float]]:
    """The first and the last value of each method that has a row; infinite if it diverged."""
    if workload.name not in {key[0] for key in rows.keys(journal)}:
        return {}
    frame = rows.load(journal, on_cut="drop")
    frame = frame[(frame["workload"] == workload.name) & (frame["budget"] == workload.budget)]
    ends = {}
    for method, part in frame.groupby("method"):
        values = part["train_loss"].fillna(math.inf).to_list()
        ends[str(method)] = values[0], values[-1]
    return ends
