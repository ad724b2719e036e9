"""How much memory a step takes beside parameters, gradients and state: measured, not counted.

What the allocator keeps counts too: small results between large temporaries leave holes that
cannot be given back. So the resident set of a process of its own is read, at its highest.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stormplus.torch import PairedOptimizer

TENSORS, ELEMENTS = 50, 500_000  # 25 M parameters

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(cls: type[torch.optim.Optimizer], options: dict[str, Any], steps: int = 5) -> float | None:
    """How far the resident set grows in some steps beyond the state, in sizes of the model.

    Args:
        cls: The optimizer; gradients are given.
        options: Its own.
        steps: How many.

    Returns:
        A number, or None where the system does not tell (it is read from /proc).
    """
    if not _RESET.exists():
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_measure, cls, options, steps, torch.get_num_threads()).result()


def state_bytes(opt: torch.optim.Optimizer) -> int:
    tensors = (v for state in opt.state.values() for v in state.values())
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _measure(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], steps: int, threads: int
) -> float:
    torch.set_num_threads(threads)
    warm = [_with_gradient(n) for n in (8, 8, 1 << 16)]
    _run(cls(warm, **options), steps)  # what the first steps import and compile
    params = [_with_gradient(ELEMENTS) for _ in range(TENSORS)]
    size = sum(p.numel() * p.element_size() for p in params)
    _RESET.write_text("5")  # the peak is counted from here on
    before = _resident("VmRSS")
    opt = cls(params, **options)
    _run(opt, steps)
    return (_resident("VmHWM") - before - state_bytes(opt)) / size


def _with_gradient(size: int) -> nn.Parameter:
    p = nn.Parameter(torch.randn(size))
    p.grad = torch.randn(size)
    return p


def _run(opt: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        if not isinstance(opt, PairedOptimizer):
            opt.step()
            continue
        if opt.started:
            opt.move()
        opt.estimate()


def _resident(what: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])
