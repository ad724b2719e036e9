"""What long commands share: signals, exit codes, error messages and lines of progress."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

EXIT_CODES = """\b
Exit codes:
  0    everything was run and written
  1    something could not be run or read; the message says what to do
  2    wrong usage
  130  interrupted; finished runs are kept"""


class RunsFailed(RuntimeError):
    """Some runs gave no row; the message says why."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C; an ignored SIGHUP (`nohup`) stays ignored.

    SIGINT is set too: a shell's background job ignores it at the start.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {sign: signal.getsignal(sign) for sign in signals}
    for sign, handler in before.items():
        if sign != signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(sign, signal.default_int_handler)
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


@contextlib.contextmanager
def exit_on_error(kept: Path, console: Console) -> Iterator[None]:
    """Turn errors into a message and an exit code; `kept` is where finished runs are stored."""
    try:
        yield
    except KeyboardInterrupt:
        message = f"interrupted; finished runs are in {kept}: repeat the command to continue"
        print_plain(console, f"\n{message}")
        raise SystemExit(130) from None
    except (RunsFailed, ValueError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error


def print_plain(console: Console, text: str) -> None:
    """Print text as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class ProgressLog:
    """Prints a line per minute unless the console is a terminal, which shows a bar."""

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, time.monotonic()

    def print(self, text: str) -> None:
        """Print the text if the last line is a minute old."""
        if not self.console.is_terminal and time.monotonic() - self.last >= 60:
            self.last = time.monotonic()
            print_plain(self.console, text)
