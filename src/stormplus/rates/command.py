"""`stormplus rates`."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from stormplus.rates.experiment import METHODS, Plan, Result, run_method
from stormplus.rates.report import read, table, write


class _Shared:
    """A progress function for another process: it leaves its step in a shared dict."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __call__(self, name: str, step: int, _total: int) -> None:
        self.steps[name] = step


@click.command()
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: T to 3,000, 6 seeds.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default="rates")
@click.option("--jobs", type=click.IntRange(min=1), default=min(2, os.cpu_count() or 1))
@click.option("--method", "methods", type=click.Choice(METHODS), multiple=True)
@click.option("--redraw", is_flag=True, help="Draw what OUTPUT holds; run nothing.")
def rates(quick: bool, output: Path, jobs: int, methods: tuple[str, ...], redraw: bool) -> None:
    """Measure E|grad f(x_bar_T)| against T and sigma, and fit the slopes.

    Writes rates.json (raw rows), rates_summary.json, rates.md and rates.png.
    """
    console = Console()
    if redraw:
        results, plan = read(output)
    else:
        plan = Plan.quick() if quick else Plan()
        results = run_all(plan, methods or METHODS, jobs, console)
    files = write(results, plan, output)
    console.print(table(results, plan), soft_wrap=True, markup=False)
    console.print("wrote " + ", ".join(str(file) for file in files), markup=False)


def run_all(plan: Plan, methods: tuple[str, ...], jobs: int, console: Console) -> dict[str, Result]:
    """Run the methods, several at a time, under one progress display."""
    context = multiprocessing.get_context("spawn")
    columns = (TextColumn("{task.description:>18}"), BarColumn(), TimeElapsedColumn())
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
        Progress(*columns, console=console) as display,
    ):
        steps = manager.dict()
        tasks: dict[str, TaskID] = {
            name: display.add_task(name, total=plan.steps) for name in methods
        }
        running: dict[str, Future[Result]] = {
            name: pool.submit(run_method, name, plan, _Shared(steps)) for name in methods
        }
        unfinished = True
        while unfinished:
            unfinished = bool(wait(running.values(), timeout=0.5).not_done)
            for name, step in steps.items():
                display.update(tasks[name], completed=step)
        return {name: future.result() for name, future in running.items()}
