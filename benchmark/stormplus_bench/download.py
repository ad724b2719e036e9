"""Fetching a release: a bar, a checksum, and no half file under the name of a whole one."""

from __future__ import annotations

import logging
import os
import tarfile
import tempfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from stormplus.files import named
from stormplus.progress import Pulse
from stormplus_bench.data import CIFAR10_TEST, CIFAR10_TRAIN

_CHUNK = 2**16
_MEMBERS = (*CIFAR10_TRAIN, CIFAR10_TEST, "batches.meta.txt")


class DownloadError(RuntimeError):
    """A file could not be fetched."""


@dataclass(frozen=True)
class Remote:
    """One file of a release: where it comes from, where it goes, how it is recognised."""

    url: str
    path: str  # under the data folder
    checksum: str  # "algorithm:hex", the algorithm being the one the source publishes
    unpacks: bool = False  # a tar archive, removed once its files are in place


@dataclass(frozen=True)
class Release:
    """A data set as its authors publish it."""

    what: str
    size: str
    source: str
    remotes: tuple[Remote, ...]


def _mnist(name: str, md5: str) -> Remote:
    url = f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}"
    return Remote(url, f"mnist/{name}", f"md5:{md5}")


RELEASES = {
    "cifar10": Release(
        "CIFAR-10, binary version: 60,000 colour images of 32 x 32, 10 classes",
        "170 MB to fetch, 184 MB unpacked",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            Remote(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "cifar-10-binary.tar.gz",
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
                unpacks=True,
            ),
        ),
    ),
    "mnist": Release(
        "MNIST: 70,000 grey images of 28 x 28, 10 digits",
        "12 MB",
        "http://yann.lecun.com/exdb/mnist, fetched from PyTorch's copy of it",
        (
            _mnist("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            _mnist("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            _mnist("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            _mnist("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
    "shakespeare": Release(
        "Tiny Shakespeare: 1.1 million characters of plays",
        "1.1 MB",
        "https://github.com/karpathy/char-rnn",
        (
            Remote(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                "tinyshakespeare/input.txt",
                "tinyshakespeare/input.txt",
                "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
    ),
}


@dataclass
class _Bar:
    """What pooch asks of a progress bar, drawn by rich."""

    display: Progress
    task: TaskID
    pulse: Pulse
    total: int = 0  # pooch sets it; 0 if the server does not tell

    def update(self, size: int) -> None:
        self.display.update(self.task, advance=size, total=self.total or None)
        told = self.display.tasks[self.task]
        self.pulse.beat(f"{told.description}: {told.completed / 1e6:.0f} MB fetched")

    def reset(self) -> None:
        self.display.update(self.task, completed=0)

    def close(self) -> None:
        self.display.refresh()


def fetch(remote: Remote, target: Path) -> None:
    """Download to a temporary file, compare the checksum, then rename to `target`.

    If `target` is there and has the checksum, nothing is downloaded.

    Raises:
        DownloadError: No connection, or the server answered with something else.
        OSError: `target` cannot be written.
    """
    import pooch  # type: ignore[import-untyped]  # the readers of the data do without it
    from requests import RequestException

    pooch.get_logger().setLevel(logging.WARNING)  # the bar says it already
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with named(target), Progress(*columns, console=console) as display:
        bar = _Bar(display, display.add_task(target.name, total=None), Pulse(console))
        # Not compressed on the way: the bar then counts the bytes of the file.
        plain = {"Accept-Encoding": "identity"}
        downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, headers=plain)
        try:
            pooch.retrieve(
                remote.url, remote.checksum, target.name, target.parent, downloader=downloader
            )
        except RequestException as error:
            raise DownloadError(f"cannot fetch {remote.url} ({error})") from error
        except ValueError as error:
            raise DownloadError(
                f"what came from {remote.url} does not have the checksum {remote.checksum}, and "
                "was not kept; a proxy may have answered instead"
            ) from error
    with suppress(PermissionError):  # a file that was there may belong to somebody else
        target.chmod(0o644)  # pooch's temporary files are for one user; data folders are shared


def unpack(archive: Path, release: Path) -> None:
    """Put the binary files of CIFAR-10's archive into `release`; files that are there stay.

    Raises:
        ValueError: The archive cannot be read, or lacks one of them.
    """
    release.mkdir(parents=True, exist_ok=True)
    missing = {f"cifar-10-batches-bin/{n}" for n in _MEMBERS if not (release / n).exists()}
    # Each file gets its name when it is whole: Ctrl-C leaves no half file.
    with tempfile.TemporaryDirectory(dir=release.parent) as folder:
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    if member.name in missing and member.isreg():
                        tar.extract(member, folder, filter="data")
                        file = Path(folder) / member.name
                        os.replace(file, release / file.name)
                        missing.remove(member.name)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(f"{archive} cannot be unpacked ({error}): delete it") from error
    if missing:
        raise ValueError(f"{archive} has no {', '.join(sorted(missing))}: delete it")
