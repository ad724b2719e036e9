"""Memory of an optimizer: its state, and what a step takes beyond it.

The resident set is measured because memory that the allocator keeps counts too: small results
between large temporaries leave holes that cannot be returned.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stormplus.torch import PairedOptimizer

TENSORS, ELEMENTS = 50, 500_000  # 25 M parameters
_RESET = Path("/proc/self/clear_refs")


def with_gradients(shapes: Iterable[Sequence[int]]) -> list[nn.Parameter]:
    """Return random parameters of these shapes that have gradients."""
    params = [nn.Parameter(0.01 * torch.randn(*shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def size_mb(tensors: Iterable[Tensor]) -> float:
    return sum(t.nbytes for t in tensors) / 2**20


def state_mb(optimizer: Any) -> float:
    """Return the size of all tensors that an optimizer keeps, without its parameters."""
    held = tree_leaves([dict(optimizer.state), optimizer.param_groups])
    tensors = {id(t): t for t in held if isinstance(t, Tensor)}
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors.pop(id(p), None)
    return size_mb(tensors.values())


def _resident_mb(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def peak(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> float | None:
    """Return how far the resident set grows in five steps beyond the state, in sizes of the model.

    Read from /proc, in a new process; None on systems that do not have it.
    """
    if not _RESET.exists():
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        make = partial(cls, **options)
        return process.submit(_measure, make, torch.get_num_threads()).result()


def _measure(make: Callable[..., torch.optim.Optimizer], threads: int) -> float:
    torch.set_num_threads(threads)
    _take_steps(make(with_gradients([(8,), (8,), (1 << 16,)])))  # imports and compiles
    params = with_gradients([(ELEMENTS,)] * TENSORS)
    _RESET.write_text("5")  # the peak to the current use
    before = _resident_mb("VmRSS")
    opt = make(params)
    _take_steps(opt)
    return (_resident_mb("VmHWM") - before - state_mb(opt)) / size_mb(params)


def _take_steps(opt: torch.optim.Optimizer) -> None:
    for _ in range(5):
        take_step(opt)


def take_step(opt: torch.optim.Optimizer) -> None:
    """Take a step with the gradients that are there, twice the same ones if it needs two."""
    if not isinstance(opt, PairedOptimizer):
        opt.step()
        return
    if opt.started:
        opt.move()
    opt.estimate()
