"""Files are written completely or not at all, signals end a command, and logs show progress."""

import errno
import io
import os
import signal

import pytest
from rich.console import Console

from stormplus_bench.files import require_writable, write_whole
from stormplus_bench.interrupts import interruptible
from stormplus_bench.progress import Pulse


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = write_whole(tmp_path / "new" / "some.txt", "olé")
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*some\.txt'"):
        write_whole(file, b"new")
    assert file.read_text("utf-8") == "olé"
    assert [path.name for path in file.parent.iterdir()] == ["some.txt"]


def test_a_symbolic_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "file.md", tmp_path / "link.md"
    file.write_text("old")
    link.symlink_to(file)
    assert write_whole(link, "new") == link
    assert link.is_symlink()
    assert file.read_text() == "new"


def test_a_folder_that_cannot_be_written_is_an_error_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/out"):
        require_writable(tmp_path / "file" / "out")
    (tmp_path / "table.csv").mkdir()
    with pytest.raises(IsADirectoryError, match=r"table\.csv is a folder"):
        require_writable(tmp_path, ("table.csv",))


@pytest.mark.parametrize("name", [s for s in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, s)])
def test_signals_are_interrupts_inside_and_restored_after(name):
    sign = getattr(signal, name)
    before = signal.signal(sign, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(sign)
        assert signal.getsignal(sign) is signal.SIG_DFL
    finally:
        signal.signal(sign, before)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal")
def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("terminal", "lines"), [(True, 0), (False, 2)])
def test_a_pipe_gets_a_line_per_minute_and_a_terminal_none(monkeypatch, terminal, lines):
    now = 0.0
    monkeypatch.setattr("stormplus_bench.progress.time.monotonic", lambda: now)
    output = io.StringIO()
    pulse = Pulse(Console(file=output, force_terminal=terminal))
    for now in (0.5, 59.0, 60.0, 61.0, 119.0, 130.0):
        pulse.beat(f"[{now}] done")
    assert output.getvalue().count("done") == lines
