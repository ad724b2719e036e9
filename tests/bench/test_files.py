"""Files are written completely or not at all, signals end a command, and logs show progress."""

import errno
import io
import os
import signal

import pytest
from rich.console import Console

from stormplus_bench.files import write_whole
from stormplus_bench.interrupts import Pulse, interruptible


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = write_whole(tmp_path / "new" / "some.txt", "olé")
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*some\.txt'"):
        write_whole(file, b"new")
    assert file.read_text("utf-8") == "olé"
    assert [path.name for path in file.parent.iterdir()] == ["some.txt"]


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
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
    assert interrupted == (before is signal.SIG_DFL)  # nohup is respected


@pytest.mark.parametrize(("terminal", "lines"), [(True, 0), (False, 2)])
def test_a_pipe_gets_a_line_per_minute_and_a_terminal_none(monkeypatch, terminal, lines):
    now = 0.0
    monkeypatch.setattr("stormplus_bench.interrupts.time.monotonic", lambda: now)
    output = io.StringIO()
    pulse = Pulse(Console(file=output, force_terminal=terminal))
    for now in (0.5, 59.0, 60.0, 61.0, 119.0, 130.0):
        pulse.beat(f"[{now}] done")
    assert output.getvalue().count("done") == lines
