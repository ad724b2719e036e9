"""Small data sets in the form of the real releases, and a server for them that can fail."""

import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
from dataclasses import replace

import numpy as np

from stormplus_bench import data
from stormplus_bench.download import RELEASES

CIFAR_RECORDS = 7
CIFAR_FILES = (*data.CIFAR10_TRAIN, data.CIFAR10_TEST)
MNIST = {"train": 5, "t10k": 3}
SENTENCE = b"to be, or not to be: that is the question.\n" * 4


def make_small(monkeypatch):
    """Let the readers expect the sizes of these files, in no folder unless told."""
    monkeypatch.delenv(data.VARIABLE, raising=False)
    monkeypatch.setattr(data, "CIFAR10_RECORDS", CIFAR_RECORDS)
    monkeypatch.setattr(data, "MNIST_IMAGES", MNIST)
    monkeypatch.setattr(data, "SHAKESPEARE_BYTES", len(SENTENCE))


def cifar10_records(k):
    """File k of six: records of a label and 3 x 32 x 32 bytes."""
    records = np.random.default_rng(k).integers(0, 256, (CIFAR_RECORDS, 3073), np.uint8)
    records[:, 0] %= 10
    return records


def write_cifar10(release):
    release.mkdir(parents=True)
    for k, name in enumerate(CIFAR_FILES, start=1):
        (release / name).write_bytes(cifar10_records(k).tobytes())


def idx(array):
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


def mnist_files():
    return {f"{stem}.gz": gzip.compress(idx(a), mtime=0) for stem, a in mnist_arrays().items()}


def write_mnist(folder, rename=lambda stem: f"{stem}.gz"):
    """Write the four files; a name that does not end in .gz is written unzipped."""
    (folder / "mnist").mkdir(parents=True)
    for stem, array in mnist_arrays().items():
        name, content = rename(stem), idx(array)
        content = gzip.compress(content, mtime=0) if name.endswith(".gz") else content
        (folder / "mnist" / name).write_bytes(content)


def write_shakespeare(folder, text=SENTENCE):
    (folder / "tinyshakespeare").mkdir(parents=True)
    (folder / "tinyshakespeare" / "input.txt").write_bytes(text)


def archive_of(files):
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def cifar10_archive():
    """As released: the binary files among others, in an order of its own."""
    files = {name: cifar10_records(k).tobytes() for k, name in enumerate(CIFAR_FILES, start=1)}
    files |= {"batches.meta.txt": b"airplane\n", "readme.html": b"<html>"}
    inside = {f"cifar-10-batches-bin/{name}": files[name] for name in reversed(files)}
    return archive_of(inside | {"../outside.bin": b"x", "other/data_batch_1.bin": b"x"})


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`; `spoil[name]` says what goes wrong: "cut", "stall", "other", "gone"."""

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = {"cifar-10-binary.tar.gz": cifar10_archive(), "input.txt": SENTENCE}
        self.content |= mnist_files()
        self.spoil, self.requests = {}, []
        self.half_sent, self.release = threading.Event(), threading.Event()

    def take_over(self, monkeypatch):
        """Let the registry name the files here; the kind of checksum is kept."""
        for name, release in tuple(RELEASES.items()):
            remotes = tuple(map(self._local, release.remotes))
            monkeypatch.setitem(RELEASES, name, replace(release, remotes=remotes))

    def _local(self, remote):
        algorithm, name = remote.checksum.partition(":")[0], remote.url.rpartition("/")[2]
        digest = hashlib.new(algorithm, self.content[name]).hexdigest()
        url = f"http://127.0.0.1:{self.server_port}/{name}"
        return replace(remote, url=url, checksum=f"{algorithm}:{digest}")


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.requests.append(name)
        content, spoil = self.server.content[name], self.server.spoil.get(name)
        if spoil == "gone":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if spoil in ("cut", "stall"):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.half_sent.set()
            if spoil == "stall":
                self.server.release.wait(20)
        else:
            self.wfile.write(b"?" * len(content) if spoil == "other" else content)

    def log_message(self, *_):
        pass
