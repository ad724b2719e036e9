"""What the commands that run a plan have in common: options and the announcement."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from stormplus.bench import rows
from stormplus.bench.plan import Plan

AT_LEAST_ONE = click.IntRange(min=1)
JOBS = click.option(
    "--jobs", default=1, type=AT_LEAST_ONE, show_default=True, help="Runs side by side."
)
THREADS = click.option(
    "--threads", default=1, type=AT_LEAST_ONE, show_default=True, help="Threads of each run."
)


def announce(plan: Plan, journal: Path, jobs: int | None, console: Console) -> None:
    """Print what is skipped, how many runs there are, and the projected time.

    `jobs` is None if somebody else knows how many run side by side.
    """
    for what, reason in plan.skipped.items():
        console.print(f"skipped {what}: {reason}", highlight=False, markup=False, soft_wrap=True)
    left = plan.left(rows.keys(journal))
    minutes = plan.projected(left, jobs or 1) / 60
    console.print(
        f"{len(plan.runs)} runs, {len(plan.runs) - len(left)} of them already in {journal}; "
        f"projected: {minutes:.1f} minutes for the other {len(left)}, "
        + (f"{jobs} at a time" if jobs else "divided by the number of workers")
        + " (measuring comes on top)",
        highlight=False,
        soft_wrap=True,
    )
