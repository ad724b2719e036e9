"""Readers of the data sets that are too large to ship.

Files are looked for under `$STORMPLUS_DATA`, in the form of their official release, and are
checked before use: a benchmark on half a data set would still carry its name. Nothing is
downloaded here (`stormplus data NAME` does that) and no pickle is ever loaded.
"""

from __future__ import annotations

import gzip
import os
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

Name: TypeAlias = Literal["cifar10", "mnist", "shakespeare"]

NAMES: tuple[Name, ...] = ("cifar10", "mnist", "shakespeare")
VARIABLE = "STORMPLUS_DATA"

# What the releases hold. Tests make them smaller.
CIFAR10_RECORDS = 10_000  # in each of the six files
MNIST_IMAGES = {"train": 60_000, "t10k": 10_000}
SHAKESPEARE_BYTES = 1_115_394

CIFAR10_TRAIN = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
_CIFAR10_SHAPE = (3, 32, 32)
_MNIST_SHAPE = (28, 28)
_CLASSES = 10
_PLACES = {
    "cifar10": "the six .bin files in {0}/cifar-10-batches-bin or {0}/cifar10/cifar-10-batches-bin",
    "mnist": "the four idx files, as released or unzipped, in {0}/mnist",
    "shakespeare": "the text in {0}/tinyshakespeare/input.txt",
}


class MissingData(FileNotFoundError):
    """A data set is not there. The message says what to place where."""


@dataclass(frozen=True)
class Images:
    """Pictures and their classes: uint8 arrays N x C x H x W, labels int64."""

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """Characters as codes: `vocabulary[code]`. The first 90% train, the rest tests."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    vocabulary: str


@overload
def load(name: Literal["cifar10", "mnist"], folder: Path | str | None = None) -> Images: ...
@overload
def load(name: Literal["shakespeare"], folder: Path | str | None = None) -> Text: ...
@overload
def load(name: str, folder: Path | str | None = None) -> Images | Text: ...
def load(name: str, folder: Path | str | None = None) -> Images | Text:
    """Read a data set.

    Args:
        name: One of `NAMES`.
        folder: Where data sets are kept; `$STORMPLUS_DATA` unless given.

    Raises:
        MissingData: It is not there; the message says what to place where.
        ValueError: A file is there and is not what was released, or there is no such name.
    """
    if name == "cifar10":
        return cifar10(folder)
    if name == "mnist":
        return mnist(folder)
    if name == "shakespeare":
        return shakespeare(folder)
    raise ValueError(f"there is no data set {name!r}: choose from {', '.join(NAMES)}")


def cifar10(folder: Path | str | None = None) -> Images:
    """CIFAR-10 from its binary release: 50,000 and 10,000 images of 3 x 32 x 32."""
    root = data_folder("cifar10", folder)
    release = cifar10_release(root)
    files = [release / name for name in (*CIFAR10_TRAIN, CIFAR10_TEST)]
    for file in files:
        if not file.is_file():
            raise _missing("cifar10", root, file)
    *train, (test_x, test_y) = [_cifar10_batch(file) for file in files]
    return Images(
        train_x=np.concatenate([x for x, _ in train]),
        train_y=np.concatenate([y for _, y in train]),
        test_x=test_x,
        test_y=test_y,
    )


def mnist(folder: Path | str | None = None) -> Images:
    """MNIST from its four idx files: 60,000 and 10,000 images of 1 x 28 x 28."""
    root = data_folder("mnist", folder)
    train_x, test_x = (_mnist_images(root, split) for split in ("train", "t10k"))
    train_y, test_y = (_mnist_labels(root, split) for split in ("train", "t10k"))
    return Images(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def shakespeare(folder: Path | str | None = None) -> Text:
    """Tiny Shakespeare: 1.1 million characters, 65 different ones, in their order of code."""
    root = data_folder("shakespeare", folder)
    file = root / "tinyshakespeare" / "input.txt"
    if not file.is_file():
        raise _missing("shakespeare", root, file)
    content = file.read_bytes()  # as bytes: text mode would hide changed line ends
    if len(content) != SHAKESPEARE_BYTES:
        raise _broken("shakespeare", file, f"{len(content)} bytes, expected {SHAKESPEARE_BYTES}")
    if not content.isascii():
        raise _broken("shakespeare", file, "not plain ASCII text")
    # A byte is a character: the text is ASCII.
    vocabulary, codes = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
    codes = codes.astype(np.int64)
    cut = len(codes) * 9 // 10
    return Text(train=codes[:cut], test=codes[cut:], vocabulary="".join(map(chr, vocabulary)))


def data_folder(name: str, folder: Path | str | None = None) -> Path:
    """`folder`, or what `$STORMPLUS_DATA` says."""
    given = folder if folder is not None else os.environ.get(VARIABLE)
    if not given:
        raise MissingData(
            f"{name} needs a data folder: set {VARIABLE} to one, then run "
            f"`stormplus data {name}`, or place {place(name, '$' + VARIABLE)}"
        )
    return Path(given).expanduser()


def cifar10_release(root: Path) -> Path:
    """The folder of CIFAR-10 under `root`: the one that is there, or where it will be."""
    beside = root / "cifar-10-batches-bin"
    return beside if beside.is_dir() else root / "cifar10" / beside.name


def place(name: str, root: Path | str) -> str:
    """What belongs where, for a person who copies files by hand."""
    return _PLACES[name].format(root)


def _missing(name: str, root: Path, file: Path) -> MissingData:
    return MissingData(
        f"{name} is not there ({file} does not exist): run "
        f"`stormplus data {name} --data-dir {shlex.quote(str(root))}`, or place {place(name, root)}"
    )


def _broken(name: str, file: Path, what: str) -> ValueError:
    return ValueError(
        f"{file} is not the released file: {what}; delete it and run `stormplus data {name}`"
    )


def _cifar10_batch(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Records of 3073 bytes: the label, then the red, green and blue planes."""
    record = 1 + int(np.prod(_CIFAR10_SHAPE))
    size, expected = file.stat().st_size, CIFAR10_RECORDS * record
    if size != expected:
        raise _broken("cifar10", file, f"{size} bytes, expected {expected}")
    rows = np.fromfile(file, np.uint8).reshape(CIFAR10_RECORDS, record)
    labels = _checked_labels("cifar10", file, rows[:, 0])
    return np.ascontiguousarray(rows[:, 1:]).reshape(-1, *_CIFAR10_SHAPE), labels


def _mnist_images(root: Path, split: str) -> NDArray[np.uint8]:
    return _idx(root, f"{split}-images", (MNIST_IMAGES[split], *_MNIST_SHAPE))[1][:, None]


def _mnist_labels(root: Path, split: str) -> NDArray[np.int64]:
    return _checked_labels("mnist", *_idx(root, f"{split}-labels", (MNIST_IMAGES[split],)))


def _idx(root: Path, stem: str, shape: tuple[int, ...]) -> tuple[Path, NDArray[np.uint8]]:
    """Read an idx file of bytes: a magic number, one big-endian size a dimension, the bytes."""
    file = _first_file(root, root / "mnist", stem, len(shape))
    content = file.read_bytes()
    try:
        content = gzip.decompress(content) if file.suffix == ".gz" else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _broken("mnist", file, f"gzip cannot read it ({error})") from error
    magic = bytes([0, 0, 8, len(shape)])  # 8: unsigned bytes
    if content[:4] != magic:
        raise _broken("mnist", file, f"it starts with {content[:4]!r}, expected {magic!r}")
    header = 4 + 4 * len(shape)
    found = tuple(int(n) for n in np.frombuffer(content[4:header].ljust(header - 4), ">u4"))
    if found != shape:
        raise _broken("mnist", file, f"it announces shape {found}, expected {shape}")
    size, expected = len(content) - header, int(np.prod(shape))
    if size != expected:
        raise _broken("mnist", file, f"{size} bytes after its header, expected {expected}")
    return file, np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(shape)


def _first_file(root: Path, release: Path, stem: str, dimensions: int) -> Path:
    released = f"{stem}-idx{dimensions}-ubyte"
    names = (
        f"{released}.gz",
        released,
        f"{stem}.idx{dimensions}-ubyte",  # what some programs unzip it to
        f"{released}.idx",
        f"{stem}.idx",
    )
    for name in names:
        if (release / name).is_file():
            return release / name
    raise _missing("mnist", root, release / f"{released}.gz")


def _checked_labels(name: str, file: Path, labels: NDArray[np.uint8]) -> NDArray[np.int64]:
    if labels.size and labels.max() >= _CLASSES:
        raise _broken(name, file, f"a label is {labels.max()}, expected less than {_CLASSES}")
    return labels.astype(np.int64)
