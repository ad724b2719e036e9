"""A server on this machine for the small data sets, which can be made to fail."""

import http.server
import io
import tarfile
import threading

import data_for_tests as small

from stormplus.bench import data


def cifar10_archive() -> bytes:
    """As released: the binary files among others, in an order of its own."""
    names = (*data.CIFAR10_TRAIN, data.CIFAR10_TEST)
    files = {name: small.cifar10_rows(k).tobytes() for k, name in enumerate(names, start=1)}
    files |= {"batches.meta.txt": b"airplane\n", "readme.html": b"<html>"}
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, content in reversed(files.items()):
            add(tar, f"cifar-10-batches-bin/{name}", content)
        add(tar, "../outside.bin", b"x")
        add(tar, "other/data_batch_1.bin", b"x")
    return whole.getvalue()


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`; `spoil[name]` says what goes wrong: "cut", "stall", "other", "gone"."""

    daemon_threads = True
    block_on_close = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content: dict[str, bytes] = {}
        self.spoil: dict[str, str] = {}
        self.requests: list[str] = []
        self.half_sent, self.release = threading.Event(), threading.Event()


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
