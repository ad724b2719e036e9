"""Run a plan under benchopt: announce it, show how far it is, survive an interruption.

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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stormplus.files import write_whole
from stormplus.interrupts import Unfinished, interruptible
from stormplus.progress import Pulse
from stormplus_bench import rows
from stormplus_bench.plan import FOLDER, KEYS, Plan, Run
from stormplus_bench.rows import Key
from stormplus_bench.train.training import part_file, share_file

POLL = 0.5  # seconds
QUIET = 60.0  # seconds without news, beyond what the longest run takes, before one is looked for
PATIENCE = 15.0  # seconds for benchopt to stop by itself


class RunsFailed(Unfinished):
    """Some runs gave no row."""


def announce(plan: Plan, journal: Path, jobs: int | None, console: Console) -> None:
    """Print what is skipped, how many runs there are, and the projected time.

    `jobs` is None if somebody else knows how many run side by side.
    """
    for what, reason in plan.skipped.items():
        console.print(f"skipped {what}: {reason}", highlight=False, markup=False, soft_wrap=True)
    left = plan.left(rows.keys(journal))
    for workload in dict.fromkeys(run.workload for run in left):
        runs = [run for run in left if run.workload == workload]
        budgets = " or ".join(f"{n:,d}" for n in sorted({run.budget for run in runs}))
        console.print(
            f"{workload}: {len(runs)} runs of {budgets} gradients of "
            f"{1e3 * plan.seconds[workload]:.3g} ms, {plan.projected(runs, 1) / 60:.1f} minutes",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    minutes = plan.projected(left, jobs or 1) / 60
    console.print(
        f"{len(plan.runs)} runs, {len(plan.runs) - len(left)} of them already in {journal}; "
        f"projected: {minutes:.1f} minutes for the other {len(left)}, "
        + (f"{jobs} at a time" if jobs else "divided by the number of workers")
        + " (measuring comes on top)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


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
    with _alone(journal) as lock, interruptible():
        while left:
            command = _command(jobs, parallel_config)
            workers = 1 if parallel_config else jobs  # as far as it is known
            environment = _environment(journal, threads)
            before = _shares(left, journal)
            _round(plan, left, journal, console, command, environment, lock, workers)
            missing = plan.left(rows.keys(journal))
            # A worker that dies takes benchopt down with it: go on as long as rows are added.
            # One that keeps its state goes on where it was, so a share more is progress too.
            if len(missing) == len(left) and _shares(missing, journal) == before:
                run = missing[0]
                raise RunsFailed(
                    f"{len(missing)} of {len(first)} runs gave no row, the first is {run.method} "
                    f"on {run.workload} at lr {run.lr:g}, seed {run.seed}: see {_log(journal)}"
                )
            left = missing
    return len(first)


@contextlib.contextmanager
def _alone(journal: Path) -> Iterator[int]:
    """A lock that benchopt inherits, so that it holds even if this process is killed."""
    import fcntl  # not on every system; only running needs it

    with journal.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunsFailed(
                f"another run is writing to {journal}, perhaps one that was killed and whose "
                "benchopt process goes on: wait for it or end it, then give the same command"
            ) from None
        yield lock.fileno()


def _log(journal: Path) -> Path:
    return journal.with_suffix(".log")


def _command(jobs: int, parallel_config: Path | None) -> list[str]:
    command = [sys.executable, "-m", "benchopt", "run", str(FOLDER)]
    command += ["--no-plot", "--no-display", "--no-timeout", "--no-cache", "--seed", "0"]
    if parallel_config is not None:
        return [*command, "--parallel-config", str(parallel_config)]
    return [*command, "--n-jobs", str(jobs)]


def _round(  # noqa: PLR0917
    plan: Plan,
    left: list[Run],
    journal: Path,
    console: Console,
    command: list[str],
    environment: dict[str, str],
    lock: int,
    workers: int,
) -> None:
    """One benchopt process; what it prints goes to the log beside the journal."""
    with tempfile.TemporaryDirectory() as scratch, _log(journal).open("w") as output:
        config = write_whole(Path(scratch) / "suite.yml", yaml.safe_dump(_only(plan.config)))
        child = subprocess.Popen(
            [*command, "--config", str(config), "--output", f"{scratch}/results.parquet"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
        try:
            _watch(child, plan, left, journal, console, workers)
        finally:
            _stop(child)


def _only(config: dict[str, Any]) -> dict[str, Any]:
    """What benchopt's own command understands."""
    return {name: config[name] for name in KEYS if name in config}


def _environment(journal: Path, threads: int) -> dict[str, str]:
    return os.environ | {
        "STORMPLUS_ROWS": str(journal.resolve()),
        "STORMPLUS_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore",
    }


def _watch(  # noqa: PLR0917
    child: subprocess.Popen[bytes],
    plan: Plan,
    left: list[Run],
    journal: Path,
    console: Console,
    workers: int,
) -> None:
    """Show the share of the work that is done, by the projected price of each run."""
    wanted = {run.key: plan.seconds[run.workload] * run.budget for run in left}
    columns = (
        TextColumn("{task.fields[done]}/{task.fields[total_runs]} runs"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[left]}"),
    )
    total, finished = sum(wanted.values()), 0.0
    start = changed = time.monotonic()
    pulse, done = Pulse(console), set[Key]()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, done=0, total_runs=len(left), left="")
        size, parts = -2, _shares(left, journal)  # no file's: the first look is news
        already = sum(wanted[k] * share for k, share in parts.items())
        while True:
            ended = child.poll() is not None
            now = journal.stat().st_size if journal.exists() else -1
            shares = _shares(left, journal)
            if now != size or shares != parts:
                size, parts = now, shares
                done = rows.keys(journal) & wanted.keys()
                shares = dict.fromkeys(done, 1.0) | {k: shares[k] for k in shares.keys() - done}
                finished = sum(wanted[k] * share for k, share in shares.items())
                changed = time.monotonic()
                progress.update(task, completed=finished, done=len(done))
            # The projection, until there is a real pace.
            spent = finished - already
            pace = spent / (changed - start) if spent > 0 else workers
            seconds = (total - finished) / pace - (time.monotonic() - changed)
            still = timedelta(seconds=max(0, round(seconds)))
            progress.update(task, left=still)
            pulse.beat(f"{len(done)}/{len(left)} runs, {finished / total:.0%}, left {still}")
            waiting = max((wanted[k] for k in wanted.keys() - done), default=0.0)
            if ended or (time.monotonic() - changed > QUIET + 3 * waiting and _lost_a_run(journal)):
                return
            time.sleep(POLL)


def _lost_a_run(journal: Path) -> bool:
    """Whether joblib has lost a run on its way to Dask, and would wait for it forever.

    It sends runs from a thread of its own; an object that changes meanwhile cannot be sent, and
    the error goes to the log instead of to benchopt. Another round runs what is missing.
    """
    return "Failed to serialize" in _log(journal).read_text(encoding="utf-8", errors="replace")


def _shares(left: list[Run], journal: Path) -> dict[Key, float]:
    """Which share of the budget those of these runs that keep their state have spent."""
    found = {}
    for run in left:
        with contextlib.suppress(OSError, ValueError):  # none, or it is written right now
            found[run.key] = float(share_file(part_file(journal, run.key)).read_text())
    return found


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
