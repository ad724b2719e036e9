"""Small data sets in the format of the real ones, and downloads of them that can fail."""

import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import requests

from stormplus_bench import data

RECORDS = 7
MNIST = {"train": 5, "t10k": 3}
SENTENCE = b"to be, or not to be: that is the question.\n" * 4


def make_small(monkeypatch, folder):
    """Let the readers expect the sizes of these files, in this folder."""
    monkeypatch.setenv(data.VARIABLE, str(folder))
    monkeypatch.setattr(data, "CIFAR10_RECORDS", RECORDS)
    monkeypatch.setattr(data, "MNIST_IMAGES", MNIST)
    monkeypatch.setattr(data, "SHAKESPEARE_BYTES", len(SENTENCE))


def cifar10_records(k):
    """File k of six: records of a label and 3 x 32 x 32 bytes."""
    records = np.random.default_rng(k).integers(0, 256, (RECORDS, 3073), np.uint8)
    records[:, 0] %= 10
    return records


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def mnist_arrays():
    """The contents of the four files by name."""
    rng, arrays = np.random.default_rng(0), {}
    for split, n in MNIST.items():
        arrays[f"{split}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28), np.uint8)
        arrays[f"{split}-labels-idx1-ubyte"] = rng.integers(0, 10, n, np.uint8)
    return arrays


def released():
    """The files to download, by name."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for k, name in enumerate(data.CIFAR10_FILES, start=1):
            content = cifar10_records(k).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    files = {"cifar-10-binary.tar.gz": whole.getvalue(), "input.txt": SENTENCE}
    return files | {f"{n}.gz": gzip.compress(idx(a), mtime=0) for n, a in mnist_arrays().items()}


class Downloads:
    """Replaces pooch's downloader; `spoil[name]` is "other" (content) or "gone"."""

    def __init__(self, monkeypatch):
        self.content, self.spoil, self.requests = released(), {}, []
        monkeypatch.setattr("pooch.core.choose_downloader", lambda url, progressbar: self.download)
        for name, (server, files) in data.REMOTES.items():
            sums = {path: self._checksum(path, known) for path, known in files.items()}
            monkeypatch.setitem(data.REMOTES, name, (server, sums))

    def _checksum(self, path, known):
        algorithm, name = known.partition(":")[0], path.rpartition("/")[2]
        return f"{algorithm}:{hashlib.new(algorithm, self.content[name]).hexdigest()}"

    def download(self, url, file, _):
        name = url.rpartition("/")[2]
        self.requests.append(name)
        content, spoil = self.content[name], self.spoil.get(name)
        if spoil == "gone":
            raise requests.HTTPError("404")
        Path(file).write_bytes(b"?" * len(content) if spoil == "other" else content)
