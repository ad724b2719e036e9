"""What long commands share: signals, exit codes, error messages and lines of progress."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

EXIT_CODES = """\b
Exit codes:
  0    everything was done
  1    something could not be run, read or written; the message says what to do
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


@contextlib.contextmanager
def progress(
    console: Console, total: float, *, transient: bool = False
) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows what is done: a bar, or a line per minute in a pipe or file."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    last = time.monotonic()
    with Progress(*columns, console=console, transient=transient) as bar:
        task = bar.add_task("", total=total)

        def show(text: str, done: float) -> None:
            nonlocal last
            bar.update(task, description=text, completed=done)
            if not console.is_terminal and time.monotonic() - last >= 60:
                last = time.monotonic()
                print_plain(console, text)

        yield show
