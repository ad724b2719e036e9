"""How a command that runs for long ends: when it is told to stop, and when something fails."""

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
  0    everything has been run and written
  1    something could not be run or read; the message says what to do
  2    the command was not called properly
  130  interrupted; what is done is kept"""


class Unfinished(RuntimeError):
    """Something that was to be run gave no result; the message says what to do."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a polite end, or a closed terminal, do what Ctrl-C does; `nohup` still works."""

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
    """End with an exit code and a message that says what to do, never with a traceback.

    `kept` is where what is done can be found.
    """
    try:
        yield
    except KeyboardInterrupt:
        text = f"\nstopped; what is done is in {kept}: the same command goes on"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(130) from None
    except (Unfinished, ValueError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error
