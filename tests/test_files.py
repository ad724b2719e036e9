"""What commands write is whole or not there, errors name the file, and a log shows life."""

import errno
import io
import os

import pytest
from rich.console import Console

from stormplus.files import require_writable, write_whole
from stormplus.progress import Pulse


def full_disk(_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    file = write_whole(tmp_path / "new" / "some.txt", "olé")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*some\.txt'"):
        write_whole(file, b"new")
    assert file.read_text("utf-8") == "olé"
    assert [path.name for path in file.parent.iterdir()] == ["some.txt"]


def test_a_folder_that_cannot_be_written_to_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/out"):
        require_writable(tmp_path / "file" / "out")
    (tmp_path / "table.csv").mkdir()
    with pytest.raises(IsADirectoryError, match=r"table\.csv is a folder"):
        require_writable(tmp_path, ("table.csv",))
    require_writable(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize(("terminal", "lines"), [(True, 0), (False, 2)])
def test_a_pipe_has_a_line_every_minute_and_a_terminal_none(monkeypatch, terminal, lines):
    now = 0.0
    monkeypatch.setattr("stormplus.progress.time.monotonic", lambda: now)
    output = io.StringIO()
    pulse = Pulse(Console(file=output, force_terminal=terminal))
    for now in (0.5, 59.0, 60.0, 61.0, 119.0, 130.0):
        pulse.beat(f"[{now}] done")
    assert output.getvalue().count("done") == lines
