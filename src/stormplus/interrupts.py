"""Ending politely: what a command that runs for long does when it is told to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


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
