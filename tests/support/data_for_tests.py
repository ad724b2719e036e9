"""Small data sets in the form of the real releases."""

import gzip
import struct
from pathlib import Path

import numpy as np

from stormplus.bench import data

CIFAR_RECORDS = 7
MNIST = {"train": 5, "t10k": 3}
SENTENCE = b"to be, or not to be: that is the question.\n" * 4


def make_small(monkeypatch):
    """Let the readers expect the sizes of these files."""
    monkeypatch.setattr(data, "CIFAR10_RECORDS", CIFAR_RECORDS)
    monkeypatch.setattr(data, "MNIST_IMAGES", MNIST)
    monkeypatch.setattr(data, "SHAKESPEARE_BYTES", len(SENTENCE))


def cifar10_rows(k):
    """File k of six: rows of a label and 3 x 32 x 32 bytes."""
    rows = np.random.default_rng(k).integers(0, 256, (CIFAR_RECORDS, 3073), np.uint8)
    rows[:, 0] %= 10
    return rows


def write_cifar10(release: Path) -> None:
    release.mkdir(parents=True)
    for k, name in enumerate((*data.CIFAR10_TRAIN, data.CIFAR10_TEST), start=1):
        (release / name).write_bytes(cifar10_rows(k).tobytes())


def idx(array) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def mnist_arrays():
    """Each released name without its ending, and what it holds."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in MNIST.items():
        arrays[f"{split}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28), np.uint8)
        arrays[f"{split}-labels-idx1-ubyte"] = rng.integers(0, 10, n, np.uint8)
    return arrays


def mnist_files() -> dict[str, bytes]:
    return {
        f"{stem}.gz": gzip.compress(idx(array), mtime=0) for stem, array in mnist_arrays().items()
    }


def write_mnist(folder: Path, rename=lambda stem: f"{stem}.gz") -> None:
    """Write the four files; a name that does not end in .gz is written unzipped."""
    (folder / "mnist").mkdir(parents=True)
    for stem, array in mnist_arrays().items():
        name, content = rename(stem), idx(array)
        content = gzip.compress(content, mtime=0) if name.endswith(".gz") else content
        (folder / "mnist" / name).write_bytes(content)


def write_shakespeare(folder: Path, text: bytes = SENTENCE) -> None:
    (folder / "tinyshakespeare").mkdir(parents=True)
    (folder / "tinyshakespeare" / "input.txt").write_bytes(text)
