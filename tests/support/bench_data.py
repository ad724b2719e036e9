"""Small data sets in the format of the real ones, and a server for them that can fail."""

import gzip
import hashlib
import http.server
import io
import struct
import tarfile

import numpy as np

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
    """The files that the server has, by name."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for k, name in enumerate(data.CIFAR10_FILES, start=1):
            content = cifar10_records(k).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    files = {"cifar-10-binary.tar.gz": whole.getvalue(), "input.txt": SENTENCE}
    return files | {f"{n}.gz": gzip.compress(idx(a), mtime=0) for n, a in mnist_arrays().items()}


class Server(http.server.ThreadingHTTPServer):
    """Serves `released()`; `spoil[name]` is "cut", "other" (content) or "gone"."""

    daemon_threads = True

    def __init__(self, monkeypatch):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.spoil, self.requests = released(), {}, []
        for name, remotes in data.REMOTES.items():
            monkeypatch.setitem(data.REMOTES, name, [self._local(*r) for r in remotes])

    def _local(self, url, path, checksum):
        algorithm, name = checksum.partition(":")[0], url.rpartition("/")[2]
        digest = hashlib.new(algorithm, self.content[name]).hexdigest()
        return f"http://127.0.0.1:{self.server_port}/{name}", path, f"{algorithm}:{digest}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.requests.append(name)
        content, spoil = self.server.content[name], self.server.spoil.get(name)
        self.send_response(404 if spoil == "gone" else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        sent = {"cut": content[: len(content) // 2], "other": b"?" * len(content)}
        self.wfile.write(sent.get(spoil, content))

    def log_message(self, *_):
        pass
