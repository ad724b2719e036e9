"""Run a plan under benchopt and show its progress.

benchopt runs in a child process and appends a row to the journal when a run ends. This process
only watches the journal, so it works in the same way with joblib, Dask and SLURM.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stormplus_bench import rows
from stormplus_bench.files import write_whole
from stormplus_bench.interrupts import Unfinished, interruptible
from stormplus_bench.plan import FOLDER, Plan, Run
from stormplus_bench.progress import Pulse

POLL = 0.5  # seconds
PATIENCE = 15.0  # seconds for benchopt to stop by itself


class RunsFailed(Unfinished):
    """Some runs gave no row."""


def announce(plan: Plan, journal: Path, jobs: int, console: Console) -> None:
    """Print what is skipped, and how long the remaining runs will take."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for what, reason in plan.skipped.items():
        say(f"skipped {what}: {reason}")
    left = plan.left(rows.keys(journal))
    if done := len(plan.runs) - len(left):
        say(f"{done} of {len(plan.runs)} runs are already in {journal}")
    minutes = plan.estimate(left) / 60 / jobs
    say(f"About {minutes:.1f} min for {len(left)} runs, plus evaluation")


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
        journal: Gets a row when a run ends.
        jobs: Runs at a time.
        threads: Threads per run.
        parallel_config: benchopt's file for Dask or SLURM, instead of `jobs`.
        console: Where to show progress.

    Returns:
        How many runs were added.

    Raises:
        RunsFailed: Some runs gave no row; the message has the cause.
        KeyboardInterrupt: After benchopt has been stopped. Finished runs are in the journal.
    """
    console = console or Console(stderr=True)
    journal.parent.mkdir(parents=True, exist_ok=True)
    first = left = plan.left(rows.keys(journal))
    log = journal.with_suffix(".log")
    workers = ["--n-jobs", str(jobs)]
    if parallel_config is not None:
        workers = ["--parallel-config", str(parallel_config)]
    environment = os.environ | {
        "STORMPLUS_ROWS": str(journal.resolve()),
        "STORMPLUS_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore",
    }
    with interruptible():
        while left:
            _round(plan, left, journal, log, workers, environment, console)
            missing = plan.left(rows.keys(journal))
            if len(missing) == len(left):  # else a worker died: continue with the rest
                run = missing[0]
                raise RunsFailed(
                    f"{len(missing)} of {len(first)} runs failed, first {run.method} on "
                    f"{run.workload} at lr {run.lr:g}, seed {run.seed}:\n{cause(log)}\n"
                    f"benchopt's output is in {log}"
                )
            left = missing
    return len(first)


def cause(log: Path) -> str:
    """Return the first error in benchopt's output, or else its last lines."""
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", log.read_text(encoding="utf-8", errors="replace"))
    error = re.search(r"^\s*((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .*)$", text, re.MULTILINE)
    return error[1] if error else "\n".join(text.strip().splitlines()[-5:])


def _round(  # noqa: PLR0917
    plan: Plan,
    left: list[Run],
    journal: Path,
    log: Path,
    workers: list[str],
    environment: dict[str, str],
    console: Console,
) -> None:
    """Run one benchopt process, with its output in the log."""
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as output:
        config = write_whole(Path(scratch) / "suite.yml", yaml.safe_dump(plan.config))
        command = [sys.executable, "-m", "benchopt", "run", str(FOLDER), *workers]
        command += ["--no-plot", "--no-display", "--no-timeout", "--no-cache", "--seed", "0"]
        command += ["--config", str(config), "--output", f"{scratch}/results.parquet"]
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
        try:
            _watch(child, plan, left, journal, log, console)
        finally:
            _stop(child)


def _watch(  # noqa: PLR0917
    child: subprocess.Popen[bytes],
    plan: Plan,
    left: list[Run],
    journal: Path,
    log: Path,
    console: Console,
) -> None:
    """Show the share of the estimated time that is done, until the child ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    pulse = Pulse(console)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=plan.estimate(left))
        ended = False
        while not ended:
            # joblib may lose a run on its way to Dask, and waits for it forever; rerun the rest.
            lost = "Failed to serialize" in log.read_text(encoding="utf-8", errors="replace")
            ended = child.poll() is not None or lost
            still = plan.left(rows.keys(journal))
            text = f"{len(plan.runs) - len(still)}/{len(plan.runs)} runs"
            progress.update(
                task, description=text, completed=plan.estimate(left) - plan.estimate(still)
            )
            pulse.beat(text)
            if not ended:
                time.sleep(POLL)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End benchopt and its workers, first as Ctrl-C does, then by SIGKILL."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # workers that outlived it
