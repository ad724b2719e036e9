"""Real processes that talk over gloo, kept from test to test since starting them is slow."""

import io
import multiprocessing
import warnings
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 30  # a collective that takes longer is a hang


class Cluster:
    def __init__(self, folder):
        self._folder, self._jobs = folder, 0
        self._processes = []  # one per rank: torch keeps facts about its rank in caches

    def run(self, size, job, *args, seconds=120, **options):
        """Return what `job(*args, **options)` returns on each of `size` ranks.

        Every job gets its own process group. If a rank fails or hangs, all processes are replaced.
        """
        assert size > 1, "one process proves nothing about many"
        spawn = multiprocessing.get_context("spawn")
        while len(self._processes) < size:
            self._processes.append(ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,)))
        self._jobs += 1
        store = f"file://{self._folder}/store{self._jobs}"
        ranks = [
            process.submit(_run, rank, size, store, job, args, options)
            for rank, process in enumerate(self._processes[:size])
        ]
        done, hanging = wait(ranks, timeout=seconds, return_when=FIRST_EXCEPTION)
        errors = [rank.exception() for rank in done if rank.exception() is not None]
        if errors or hanging:
            self.close()
            raise errors[0] if errors else TimeoutError(f"{len(hanging)} ranks hang")
        return [torch.load(io.BytesIO(rank.result()), weights_only=False) for rank in ranks]

    def close(self):
        """Kill the processes: they may wait for each other."""
        for pool in self._processes:
            for process in pool._processes.values():
                process.kill()
            pool.shutdown(cancel_futures=True)
        self._processes = []


def _run(rank, size, store, job, args, options):
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )  # fmt: skip
    try:
        dist.barrier()  # a short job could be over before all ranks are connected
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch's own, raised inside torch.compile
            warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
            answer = io.BytesIO()  # torch would otherwise pass file descriptors of shared memory
            torch.save(job(*args, **options), answer)
            return answer.getvalue()
    finally:
        dist.destroy_process_group()
