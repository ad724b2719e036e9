"""What a step asks of a device: launches, waits and copies, counted on a simulated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from stormplus.torch import PairedOptimizer
from stormplus_bench.simulated_device import Counts, SimulatedDevice

_WARM_UP = 2  # the first steps make state and upload tables


def device_counts(
    make: Callable[[list[nn.Parameter]], Optimizer],
    shapes: Sequence[torch.Size],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cuda",
) -> Counts:
    """Return the counts of one step after the first few; for a paired optimizer, of both halves.

    Triton kernels are not simulated: the counts are those of the portable backend.

    Args:
        make: Makes the optimizer.
        shapes: Of the parameters.
        dtype: Of the parameters.
        device: The type of the device.
    """
    with SimulatedDevice(device) as simulated:
        zeros = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
        params = [nn.Parameter(simulated.put(t)) for t in zeros]
        for p, t in zip(params, zeros):
            p.grad = simulated.put(t)
        opt = make(params)
        for _ in range(_WARM_UP):
            _step(opt)
        simulated.reset()
        _step(opt)
        return simulated.counts


def _step(opt: Optimizer) -> None:
    if not isinstance(opt, PairedOptimizer):
        opt.step()
        return
    if opt.started:
        opt.move()
    opt.estimate()
