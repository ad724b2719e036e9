"""How commands write: a file is there completely or not at all, and an error names it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write a file that is there completely or not at all, whenever this is interrupted.

    Args:
        path: The file; its folder is made if it is not there.
        content: Text is written as UTF-8.

    Returns:
        The path.

    Raises:
        OSError: It cannot be written; the error names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    half = path.with_name(f"{path.name[:100]}.{os.getpid()}.tmp")
    with named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with half.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(half, path)
        finally:
            half.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an OSError the name of the file that could not be written: a full disk tells none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's: it says what it has to say
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def require_writable(folder: Path, names: tuple[str, ...] = ()) -> None:
    """Raise before the work rather than after it if a folder cannot be written to.

    Args:
        folder: It is made if it is not there.
        names: Files that will be written to it; a folder of that name is in the way.

    Raises:
        OSError: The error names the place.
    """
    with named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0")
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{folder / name} is a folder, and a file is to be written")
