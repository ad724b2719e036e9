"""The passes over memory of `Untuned`: learn, move, and how far x has come."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stormplus.torch.kernels import BLOCK, Batch
from stormplus.torch.norms import Part, blocks, square_norm
from stormplus.torch.sharding import local
from stormplus.torch.work import Work


def learn(batch: Batch, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Update d by a (g - d), and s to the root of (1 - b) s^2 + b g^2; |g|^2 and |d|^2."""
    a, b = (weight.to(batch.ds[0].device, batch.ds[0].dtype) for weight in (a, b))
    for x, d, g_raw, s in _pieces(batch, "gradient_unit"):
        g = batch.gradient(x, g_raw)
        g = torch.zeros_like(d) if g is None else g
        d.lerp_(g, a)
        torch.hypot(s * (1 - b).sqrt(), g * b.sqrt(), out=s)  # squares would leave float32
        yield square_norm(g), square_norm(d)


def move(batch: Batch, eta: Tensor, unit: float | None) -> None:
    """Move: x <- x - lr eta d / s, where 0/0 is 0; `unit` is s if that is fixed."""
    alpha = (batch.lr * eta).to(batch.ds[0].device, batch.ds[0].dtype)
    for x, d, _, s in _pieces(batch, "gradient_unit"):
        step = d / (s.clamp_min(torch.finfo(s.dtype).tiny) if unit is None else unit)
        if batch.decoupled:
            step.add_(x, alpha=batch.decoupled)
        x.sub_(step.mul_(alpha))  # half-precision x is rounded once, at the end


def remember_origin(work: Work) -> None:
    """The parameters that join start here: x_1, and their average so far."""
    for batch in work.joining.values():
        for x, state in zip(batch.xs, batch.states):
            local(state["origin"]).copy_(x)
            if "average" in state:
                local(state["average"]).copy_(x)


def distances(work: Work) -> list[list[Part]]:
    """The parts of |x - x_1|^2, and those of |x_1|^2 of the parameters that join."""
    moved: list[Part] = []
    start: list[Part] = []
    for batch, joining in work.batches():
        for x, d, state in zip(batch.xs, batch.ds, batch.states):
            for x_, origin in blocks(BLOCK, x, local(state["origin"])):
                # As precise as d: the difference of two float16 can leave its range.
                part = square_norm(x_ if joining else x_.to(d.dtype) - origin)
                (start if joining else moved).append((batch.bucket, batch.process_groups, part))
    return [moved, start]


def _pieces(batch: Batch, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """As `Batch.pieces`, with another buffer beside."""
    for i, (x, d) in enumerate(zip(batch.xs, batch.ds)):
        if x.numel() == 0:
            continue
        buffer = local(batch.states[i][name])
        if batch.has_grad:
            yield from blocks(BLOCK, x, d, batch.gs[i], buffer)  # type: ignore[misc]
        else:
            yield from ((x_, d_, None, b_) for x_, d_, b_ in blocks(BLOCK, x, d, buffer))
