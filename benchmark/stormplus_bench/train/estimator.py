"""What the paper's argument is about, of a run of STORM+: its scalars and its estimator's error.

Between two steps the parameters are x_t and the buffer is d_t, the estimate of grad f(x_t). f is
the expected loss of a mini-batch. With BatchNorm an image's loss depends on who else is in its
mini-batch, so the mean over one epoch, F, is not yet grad f. Two epochs with orders of their own
have independent means F and F', and products of the two have no bias:

    |grad f|^2       is estimated by  F . F'
    |d - grad f|^2                    (d - F) . (d - F')
    E|g - grad f|^2                   the mean of |g|^2 over all mini-batches, less F . F'

An estimate of a small square may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stormplus import StormPlus
from stormplus_bench.train.workload import Network

QUANTITIES = (
    "gain",
    "step_size",  # lr times eta_t: what the move multiplies d_t with
    "grad_norm",  # |g_t|
    "estimator_norm",  # |d_t|
    "full_grad_sq",  # |grad f(x_t)|^2
    "error_sq",  # |d_t - grad f(x_t)|^2
    "batch_error_sq",  # E|g - grad f(x_t)|^2 of a mini-batch's gradient g
)
ORDERS = (1_000_000, 1_000_001)  # seeds that no run has


def quantities(optimizer: StormPlus, model: nn.Module, workload: Network) -> dict[str, float]:
    """The quantities between two steps; costs the gradients of two epochs."""
    if not optimizer.started:
        return dict.fromkeys(QUANTITIES, math.nan)
    (group,) = optimizer.param_groups
    scalars = optimizer.diagnostics()
    found = {"gain": scalars["gain"], "step_size": group["lr"] * scalars["step_size"]}
    params = [p for p in group["params"] if p.grad is not None]
    g = [p.grad for p in params if p.grad is not None]
    d = [optimizer.state[p]["estimator"] for p in params]
    found["grad_norm"], found["estimator_norm"] = math.sqrt(dot(g, g)), math.sqrt(dot(d, d))
    means, square = [], 0.0
    for seed in ORDERS:
        mean, count = [torch.zeros_like(p) for p in params], 0
        for batch in workload.batch_gradients(model, seed):
            for total, part in zip(mean, batch):
                total.add_(part)
            square += dot(batch, batch)
            count += 1
        means.append([total / count for total in mean])
    found["full_grad_sq"] = dot(*means)
    found["error_sq"] = dot(*([a - b for a, b in zip(d, mean)] for mean in means))
    found["batch_error_sq"] = square / (count * len(ORDERS)) - found["full_grad_sq"]
    return {name: float(found[name]) for name in QUANTITIES}


def dot(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """The inner product of all of them together, summed in float64."""
    parts = [torch.sum(a.detach() * b.detach(), dtype=torch.float64) for a, b in zip(left, right)]
    return float(torch.stack(parts).sum())
