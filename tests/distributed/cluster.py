"""Real processes that talk over gloo, kept from test to test since starting them is slow.

Every job gets a process group of its own. A rank that fails or hangs fails the test within
a bounded time, and the processes are replaced.
"""

import io
import multiprocessing
import os
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 30  # a collective that takes longer is a hang
GRACE_SECONDS = 5  # for the other ranks, once one has failed


class Cluster:
    def __init__(self, folder):
        self._folder, self._jobs = folder, 0
        self._workers = []  # (process, connection)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()

    def run(self, size, job, *args, seconds=120, backend="gloo", **options):
        """What `job(*args, **options)` returns on each of `size` ranks."""
        assert size > 1, "one process proves nothing about many"
        self._start(size)
        self._jobs += 1
        store = f"file://{self._folder}/store{self._jobs}"
        connections = [connection for _, connection in self._workers[:size]]
        for rank, connection in enumerate(connections):
            connection.send((job, backend, rank, size, store, args, options))
        answers, deadline = {}, time.monotonic() + seconds
        while len(answers) < size:
            open_ones = [c for c in connections if c not in answers]
            ready = wait(open_ones, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                answers[connection] = _received(connection)
                if not answers[connection][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(answers) == size and all(fine for fine, _ in answers.values()):
            return [answers[connection][1] for connection in connections]
        self._end()
        failures = "\n".join(what for fine, what in answers.values() if not fine)
        silent = [rank for rank, c in enumerate(connections) if c not in answers]
        raise AssertionError(f"ranks without an answer: {silent}\n{failures}")

    def _start(self, size):
        context = multiprocessing.get_context("spawn")
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when the process starts
        for _ in range(size - len(self._workers)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before

    def _end(self):
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []


def _received(connection):
    try:
        answer = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
    except EOFError:
        return False, "a process has died"
    return answer


def _serve(connection):
    torch.set_num_threads(1)
    while True:
        try:
            job, backend, rank, size, store, args, options = connection.recv()
        except EOFError:  # the tests are over
            return
        try:
            answer = True, _run(job, backend, rank, size, store, args, options)
        except BaseException:
            answer = False, f"--- rank {rank}\n{traceback.format_exc()}"
        # As bytes: torch would otherwise hand over file descriptors of shared memory.
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        connection.send_bytes(buffer.getvalue())


def _run(job, backend, rank, size, store, args, options):
    torch.manual_seed(0)
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )  # fmt: skip
    try:
        dist.barrier()  # a short job could be over before all ranks are connected
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch's own, raised inside torch.compile
            warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
            return job(*args, **options)
    finally:
        dist.destroy_process_group()
