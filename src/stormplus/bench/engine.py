"""Run a plan under benchopt, show how far it is, and survive an interruption.

benchopt runs in a process of its own and appends every finished run to the journal. This
side only watches the journal: so the progress is right for joblib, Dask and SLURM alike.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stormplus.bench import rows
from stormplus.bench.plan import Plan, Run, benchmark_folder

POLL = 0.5  # seconds
PATIENCE = 15.0  # seconds for benchopt to stop by itself


class RunsFailed(RuntimeError):
    """Some runs gave no row."""


def execute(
    plan: Plan,
    journal: Path,
    *,
    jobs: int = 1,
    threads: int = 1,
    parallel_config: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run what the journal does not have yet.

    Args:
        plan: From `make_plan`.
        journal: Grows by a line as each run ends.
        jobs: Runs side by side.
        threads: Threads of each.
        parallel_config: benchopt's file for Dask or SLURM, instead of `jobs`.
        console: Where to show progress.

    Returns:
        How many runs were added.

    Raises:
        RunsFailed: Some gave no row; the message says where benchopt's output is.
        KeyboardInterrupt: After benchopt has been stopped. The journal is whole.
    """
    console = console or Console(stderr=True)
    journal.parent.mkdir(parents=True, exist_ok=True)
    first = left = plan.left(rows.keys(journal))
    while left:
        _pass(
            plan,
            left,
            journal,
            console,
            jobs=jobs,
            threads=threads,
            parallel_config=parallel_config,
        )
        missing = plan.left(rows.keys(journal))
        # A worker that dies takes benchopt down with it: go on as long as rows are added.
        if len(missing) == len(left):
            run = missing[0]
            raise RunsFailed(
                f"{len(missing)} of {len(first)} runs gave no row, the first is {run.method} on "
                f"{run.workload} at lr {run.lr:g}, seed {run.seed}: see {_log(journal)}"
            )
        left = missing
    return len(first)


def _log(journal: Path) -> Path:
    return journal.with_suffix(".log")


def _pass(
    plan: Plan,
    left: list[Run],
    journal: Path,
    console: Console,
    *,
    jobs: int,
    threads: int,
    parallel_config: Path | None,
) -> None:
    """One benchopt process; what it prints goes to the log beside the journal."""
    with tempfile.TemporaryDirectory() as scratch, _log(journal).open("w") as output:
        config = Path(scratch) / "suite.yml"
        config.write_text(yaml.safe_dump(_only(plan.config)))
        command = [sys.executable, "-m", "benchopt", "run", str(benchmark_folder())]
        command += ["--config", str(config), "--output", f"{scratch}/results.parquet"]
        command += ["--no-plot", "--no-display", "--no-timeout", "--no-cache", "--seed", "0"]
        if parallel_config is not None:
            command += ["--parallel-config", str(parallel_config)]
        else:
            command += ["--n-jobs", str(jobs)]
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(journal, threads),
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
        try:
            _watch(child, plan, left, journal, console)
        finally:
            _stop(child)


def _only(config: dict[str, Any]) -> dict[str, Any]:
    """What benchopt's own command understands."""
    return {name: config[name] for name in ("objective", "dataset", "solver") if name in config}


def _environment(journal: Path, threads: int) -> dict[str, str]:
    return os.environ | {
        "STORMPLUS_ROWS": str(journal.resolve()),
        "STORMPLUS_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore",
    }


def _watch(
    child: subprocess.Popen[bytes], plan: Plan, left: list[Run], journal: Path, console: Console
) -> None:
    """Show the share of the work that is done, by the projected price of each run."""
    wanted = {run.key: plan.seconds[run.workload] * run.budget for run in left}
    columns = (
        TextColumn("{task.fields[done]}/{task.fields[total_runs]} runs"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(wanted.values()), done=0, total_runs=len(left))
        size = -1
        while True:
            ended = child.poll() is not None
            now = journal.stat().st_size if journal.exists() else -1
            if now != size:
                size = now
                done = rows.keys(journal) & wanted.keys()
                progress.update(task, completed=sum(wanted[k] for k in done), done=len(done))
            if ended:
                return
            time.sleep(POLL)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End benchopt and its workers: first as Ctrl-C does, then for certain."""
    for sign, patience in ((signal.SIGINT, PATIENCE), (signal.SIGKILL, PATIENCE)):
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # workers that outlived it
