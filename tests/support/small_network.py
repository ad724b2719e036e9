"""A network small enough to train in milliseconds."""

from __future__ import annotations

import torch
from torch import nn

from stormplus_bench.train.workload import Network


def small(batches: int = 5) -> Network:
    """A network with BatchNorm on a few random images; the budget counts samples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * batches, 2, 4, 4, generator=generator)
    targets = torch.randint(3, (4 * batches,), generator=generator)

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )

    workload = Network("small", make, (inputs, targets), (inputs, targets), budget=8, batch_size=4)
    workload.counts, workload.resumes, workload.watches = "samples", True, True
    workload.fractions = (0, 0.25, 0.5, 1)
    return workload
