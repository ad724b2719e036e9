"""Signals end a command, and logs show progress."""

import io
import signal

import pytest
from rich.console import Console

from stormplus_bench.interrupts import interruptible, progress


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_signals_are_interrupts_inside_and_restored_after(sign, before):
    interrupted = False
    handler = signal.signal(sign, before)
    try:
        with interruptible():
            signal.raise_signal(sign)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        assert signal.signal(sign, handler) is before
    assert interrupted == (sign != signal.SIGHUP or before is signal.SIG_DFL)  # `nohup`


@pytest.mark.parametrize(("terminal", "lines"), [(True, 0), (False, 2)])
def test_a_pipe_gets_a_line_per_minute_and_a_terminal_none(monkeypatch, terminal, lines):
    now = 0.0
    monkeypatch.setattr("stormplus_bench.interrupts.time.monotonic", lambda: now)
    output = io.StringIO()
    with progress(Console(file=output, force_terminal=terminal), 10, transient=True) as show:
        for now in (0.5, 59.0, 60.0, 61.0, 119.0, 130.0):
            show(f"[{now}] done", 1)
    assert output.getvalue().count("done\n") == lines
