"""Run methods in processes of their own, and end these with us, however we end."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from stormplus.interrupts import Unfinished, interruptible
from stormplus.theory.rates.experiment import Plan, Result, run_method


class MethodFailed(Unfinished):
    """A method's process ended without a result."""


def run_all(
    plan: Plan,
    methods: Sequence[str],
    jobs: int,
    keep: Callable[[Result], None],
    show: Callable[[str, int], None] = lambda *_: None,
) -> None:
    """Run the methods, several at a time.

    Args:
        plan: What is run.
        methods: Their names.
        jobs: How many at a time.
        keep: Called with each result as soon as it is there.
        show: Called with a method's name and step; first with 0, when it starts.

    Raises:
        MethodFailed: One gave no result; the others have been ended.
        KeyboardInterrupt: After all of them have been ended.
    """
    left = list(methods)
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    with interruptible():
        try:
            while left or running:
                while left and len(running) < jobs:
                    name = left.pop(0)
                    with _no_ctrl_c():  # the process inherits that: Ctrl-C reaches it through us
                        pipe, process = _start(name, plan)
                        running[pipe] = name, process
                    show(name, 0)
                ready = wait(list(running))
                for pipe in [pipe for pipe in running if pipe in ready]:
                    _listen(pipe, running, keep, show)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.join()


def _start(name: str, plan: Plan) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(name, plan, theirs), daemon=True)
    process.start()
    theirs.close()  # else its end would not be seen here
    return ours, process


def _work(name: str, plan: Plan, pipe: Any) -> None:
    """In the other process: send steps, at last the result."""
    # A broken pipe: whoever started us was killed, and nobody wants the result.
    with contextlib.suppress(BrokenPipeError):
        pipe.send(run_method(name, plan, lambda _name, step, _total: pipe.send(step)))


def _listen(
    pipe: Connection,
    running: dict[Connection, tuple[str, BaseProcess]],
    keep: Callable[[Result], None],
    show: Callable[[str, int], None],
) -> None:
    name, process = running[pipe]
    try:
        news = pipe.recv()
    except EOFError:
        process.join()
        raise MethodFailed(
            f"{name} ended without a result (exit code {process.exitcode}); an error is shown "
            "above, without one it was killed, perhaps for want of memory. What is done is kept: "
            "the same command goes on"
        ) from None
    if isinstance(news, Result):
        with _no_ctrl_c():
            keep(news)
        process.join()
        del running[pipe]
        pipe.close()
    else:
        show(name, news)


@contextlib.contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C wait until this is done."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # else the first process starts it, which ends the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
