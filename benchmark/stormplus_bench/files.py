"""Write files completely or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write a file through a temporary one, so that an interruption leaves no half file.

    Missing folders are created. A symbolic link stays, its target changes. Text is UTF-8. An
    OSError names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()
    temporary = target.with_name(f"{target.name[:100]}.{os.getpid()}.tmp")
    with named(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that lacks it, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by a library, with its own message
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
