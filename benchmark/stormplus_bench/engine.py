"""Run a plan under benchopt and show its progress.

benchopt runs in a child process and appends a row to the journal when a run ends. This process
only watches the journal, so it works in the same way with joblib, Dask and SLURM.
"""

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

from stormplus_bench import rows
from stormplus_bench.interrupts import RunsFailed, interruptible, print_plain, progress
from stormplus_bench.plan import FOLDER, Plan

POLL = 0.5  # seconds
PATIENCE = 15.0  # seconds for benchopt to stop by itself


def announce(plan: Plan, journal: Path, console: Console) -> None:
    """Print what is skipped, and the number of runs."""
    for what, reason in plan.skipped.items():
        print_plain(console, f"skipped {what}: {reason}")
    done = len(plan.runs) - len(plan.left(rows.keys(journal)))
    print_plain(console, f"{len(plan.runs)} runs, {done} of them already in {journal}")


def execute(
    plan: Plan,
    journal: Path,
    *,
    jobs: int = 1,
    threads: int = 1,
    parallel_config: Path | None = None,
) -> None:
    """Run what the journal does not have yet.

    `parallel_config` is benchopt's file for Dask or SLURM, used instead of `jobs`.

    Raises:
        RunsFailed: Some runs gave no row; the message has the cause.
        KeyboardInterrupt: After benchopt has been stopped. Finished runs are in the journal.
    """
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
            with tempfile.TemporaryDirectory() as scratch, log.open("w") as output:
                child = subprocess.Popen(
                    _command(plan, Path(scratch), workers),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches it through us, once
                )
                try:
                    _watch(child, plan, journal, log)
                finally:
                    _stop(child)
            missing = plan.left(rows.keys(journal))
            if len(missing) == len(left):  # else a worker died: continue with the rest
                run = missing[0]
                raise RunsFailed(
                    f"{len(missing)} of {len(first)} runs failed, first {run.method} on "
                    f"{run.workload} at lr {run.lr:g}, seed {run.seed}:\n"
                    f"{cause(log, plan.folders)}\nbenchopt's output is in {log}"
                )
            left = missing


def _command(plan: Plan, scratch: Path, workers: list[str]) -> list[str]:
    config = scratch / "suite.yml"
    config.write_text(yaml.safe_dump(plan.config))
    command = [sys.executable, "-m", "benchopt", "run", str(FOLDER), *workers]
    command += ["--no-plot", "--no-display", "--no-timeout", "--no-cache", "--seed", "0"]
    return [*command, "--config", str(config), "--output", str(scratch / "results.parquet")]


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def cause(log: Path, folders: set[Path]) -> str:
    """Return the first error in benchopt's output, with its line in the user's folders.

    Without an error, return the last lines of the output.
    """
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", _text(log))
    error = re.search(r"^\s*((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .*)$", text, re.MULTILINE)
    if error is None:
        return "\n".join(text.strip().splitlines()[-5:])
    places = re.findall(r'^ *File "(.+)", line (\d+)', text[: error.start()], re.MULTILINE)
    own = [f"{file}, line {line}: " for file, line in places if Path(file).parent in folders]
    return "".join(own[-1:]) + error[1]


def _watch(child: subprocess.Popen[bytes], plan: Plan, journal: Path, log: Path) -> None:
    """Show how many runs are done, until the child ends."""
    total, ended = len(plan.runs), False
    with progress(Console(stderr=True), total) as show:
        while not ended:
            # joblib may lose a run on its way to Dask, and waits for it forever; rerun the rest.
            ended = child.poll() is not None or "Failed to serialize" in _text(log)
            done = total - len(plan.left(rows.keys(journal)))
            show(f"{done}/{total} runs", done)
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
