"""CIFAR-10, MNIST and Tiny Shakespeare: read their official files, or download them.

They are kept in `$STORMPLUS_DATA`, by default a folder in the user's cache. `stormplus data NAME`
downloads them; a workload without its data is skipped. No pickle is ever loaded.
"""

import contextlib
import gzip
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pooch  # type: ignore[import-untyped]
from numpy.typing import NDArray

VARIABLE = "STORMPLUS_DATA"
CIFAR10_FILES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")
# Sizes of the releases. Tests make them smaller.
CIFAR10_RECORDS = 10_000  # in each of the six files
MNIST_IMAGES = {"train": 60_000, "t10k": 10_000}
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# By data set: a server, and by place in the data folder the published checksums of its files.
REMOTES: dict[str, tuple[str, dict[str, str]]] = {
    "cifar10": (
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
    ),
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com",
        {
            "mnist/train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "mnist/train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "mnist/t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
            "mnist/t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "shakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data",
        {"tinyshakespeare/input.txt": f"sha256:{SHAKESPEARE_SHA256}"},
    ),
}
NAMES = tuple(REMOTES)


class MissingData(FileNotFoundError):
    """A data set has not been downloaded; the message says how to."""


class DownloadError(RuntimeError):
    """A file could not be downloaded."""


class Images(NamedTuple):
    """Images, uint8 of shape N x C x H x W, and labels, int64."""

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]


class Text(NamedTuple):
    """Characters as codes into `vocabulary`; the first 90% are for training."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    vocabulary: str


def data_folder(folder: Path | str | None = None) -> Path:
    """Return `folder`, else `$STORMPLUS_DATA`, else a folder in the user's cache."""
    return Path(folder or os.environ.get(VARIABLE) or pooch.os_cache("stormplus")).expanduser()


def load(name: str, folder: Path | str | None = None) -> Any:
    """Read a data set: `Images`, or the `Text` of "shakespeare".

    Raises:
        MissingData: A file is missing; the message says how to download it.
        ValueError: A file differs from its release, or the name is unknown.
    """
    readers = {"cifar10": cifar10, "mnist": mnist, "shakespeare": shakespeare}
    if name not in readers:
        raise ValueError(f"no data set {name!r}: choose from {', '.join(readers)}")
    return readers[name](folder)


def cifar10(folder: Path | str | None = None) -> Images:
    """Read CIFAR-10's binary version: 50,000 and 10,000 images of 3 x 32 x 32."""
    release = data_folder(folder) / "cifar-10-batches-bin"
    *train, (test_x, test_y) = [_cifar10_batch(release / name) for name in CIFAR10_FILES]
    train_x, train_y = (np.concatenate(parts) for parts in zip(*train))
    return Images(train_x, train_y, test_x, test_y)


def _cifar10_batch(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read records of 3073 bytes: the label, then the red, green and blue planes."""
    content = np.frombuffer(_content("cifar10", file, CIFAR10_RECORDS * 3073), np.uint8)
    records = content.reshape(CIFAR10_RECORDS, 3073)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return images, records[:, 0].astype(np.int64)


def mnist(folder: Path | str | None = None) -> Images:
    """Read MNIST's four compressed idx files: images of 1 x 28 x 28."""
    root, arrays = data_folder(folder) / "mnist", []
    for split, count in MNIST_IMAGES.items():
        arrays.append(_idx(root / f"{split}-images-idx3-ubyte.gz", (count, 28, 28))[:, None])
        arrays.append(_idx(root / f"{split}-labels-idx1-ubyte.gz", (count,)).astype(np.int64))
    return Images(*arrays)


def _idx(file: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Read an idx file of bytes: a magic number, the sizes of the dimensions, the bytes."""
    header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
    content = _content("mnist", file, len(header) + int(np.prod(shape)))
    if not content.startswith(header):
        raise _wrong("mnist", file, f"its header is {content[: len(header)]!r}, not {header!r}")
    return np.frombuffer(bytearray(content), np.uint8, offset=len(header)).reshape(shape)


def shakespeare(folder: Path | str | None = None) -> Text:
    """Read Tiny Shakespeare: 1.1 million characters, 65 different ones."""
    file = data_folder(folder) / "tinyshakespeare" / "input.txt"
    content = np.frombuffer(_content("shakespeare", file, SHAKESPEARE_BYTES), np.uint8)
    vocabulary, codes = np.unique(content, return_inverse=True)
    train, test = np.split(codes.astype(np.int64), [len(codes) * 9 // 10])
    return Text(train, test, "".join(map(chr, vocabulary)))


def _content(name: str, file: Path, size: int) -> bytes:
    """Return the bytes of a file, decompressed, after a check of their number."""
    if not file.is_file():
        raise MissingData(f"{file} does not exist: run `stormplus data {name}`")
    content = file.read_bytes()
    try:
        content = gzip.decompress(content) if file.suffix == ".gz" else content
    except (EOFError, OSError, zlib.error) as error:
        raise _wrong(name, file, f"gzip cannot read it ({error})") from error
    if len(content) != size:
        raise _wrong(name, file, f"{len(content)} bytes, expected {size}")
    return content


def _wrong(name: str, file: Path, what: str) -> ValueError:
    return ValueError(
        f"{file} is not the released file: {what}; delete it and run `stormplus data {name}`"
    )


def download(name: str, folder: Path | str | None = None) -> None:
    """Download the missing files of a data set and compare their checksums.

    Raises:
        ValueError: A file that is there differs from its release.
        DownloadError: No connection, or another content; the message names the files to copy.
        OSError: The folder cannot be written.
    """
    from requests import RequestException

    with contextlib.suppress(MissingData):
        load(name, folder)
        return
    root, (server, files) = data_folder(folder), REMOTES[name]
    for path, checksum in files.items():
        target, url, unpack = root / path, f"{server}/{path}", None
        if path.endswith(".tar.gz"):
            unpack = pooch.Untar([f"cifar-10-batches-bin/{f}" for f in CIFAR10_FILES], root)
        elif target.exists():
            continue
        try:
            pooch.retrieve(url, checksum, target.name, target.parent, unpack)
        except (RequestException, ValueError) as error:
            raise DownloadError(
                f"cannot download {url}: {error}\n"
                f"Try again, or copy the file to {target} and repeat the command"
            ) from error
        target.chmod(0o644)  # data folders are shared; pooch's temporary files are not
        if unpack:
            target.unlink()
