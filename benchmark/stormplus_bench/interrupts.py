"""End a long command: signals, exit codes and error messages."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

EXIT_CODES = """\b
Exit codes:
  0    everything was run and written
  1    something could not be run or read; the message says what to do
  2    wrong usage
  130  interrupted; finished runs are kept"""


class Unfinished(RuntimeError):
    """Some runs gave no result; the message says what to do."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C; an ignored SIGHUP (`nohup`) stays ignored."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = [signal.signal(sign, interrupt) for sign in wanted]
    try:
        yield
    finally:
        for sign, handler in zip(wanted, before):
            signal.signal(sign, handler)


@contextlib.contextmanager
def explained(kept: Path, console: Console) -> Iterator[None]:
    """Turn errors into a message and an exit code; `kept` is where finished runs are stored."""
    try:
        yield
    except KeyboardInterrupt:
        text = f"\ninterrupted; finished runs are in {kept}: repeat the command to continue"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(130) from None
    except (Unfinished, ValueError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error
