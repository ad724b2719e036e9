"""What a step asks of a device: launches, waits and copies, counted on a simulated one."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from stormplus_bench.memory import take_step
from stormplus_bench.simulated_device import Counts, SimulatedDevice


def device_counts(
    make: Callable[[list[nn.Parameter]], Optimizer],
    shapes: Sequence[torch.Size],
    *,
    dtype: torch.dtype = torch.float32,
) -> Counts:
    """Return the counts of the third step; for a paired optimizer, of both halves.

    Triton kernels are not simulated: the counts are those of the portable backend.
    """
    with SimulatedDevice() as simulated:
        zeros = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
        params = [nn.Parameter(simulated.put(t)) for t in zeros]
        for p, t in zip(params, zeros):
            p.grad = simulated.put(t)
        opt = make(params)
        for _ in range(3):  # the first two make state and upload tables
            simulated.reset()
            take_step(opt)
        return simulated.counts
