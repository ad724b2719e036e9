"""The two passes over memory, MOVE and ESTIMATE, on batches of tensors.

    move:      x <- x - alpha d,  d <- d - g~                         reads x, d, g~  writes x, d
    estimate:  d <- g + (1 - a) d, with |g|^2 and |d|^2 on the way   reads d, g      writes d

Between the two, d holds the innovation d_t - g~_t. That is 8 streams of the parameters' size;
a probe of g~ for what is not finite makes 9 (Adam's fused step has 7).

Written three ways: `Plain` goes block by block, `Foreach` uses torch's multi-tensor
operations, `Fused` (in fused.py) is one compiled kernel with dynamic shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from stormplus.torch.norms import Groups, Part, accumulator_dtype, blocks, scratch_for, square_norm

# 2^19 float32 elements are 2 MB: a block and its temporaries stay in the cache.
BLOCK = 1 << 19


@dataclass(slots=True)
class Batch:
    """Tensors of one dtype and device that share every coefficient.

    They are what lies on this process (shards, not DTensors), with complex numbers seen
    as pairs of reals.
    """

    alpha: Tensor  # lr eta_t, 0-d
    keep: Tensor  # 1 - a_{t+1}, 0-d
    sign: float  # -1 to maximize
    l2: float  # weight decay as part of the objective
    decoupled: float  # weight decay beside it
    lr: float | Tensor
    bucket: int  # whose sums the norms enter
    has_grad: bool  # a missing gradient is a zero gradient
    kernels: Kernels
    process_groups: Groups = ()  # over which the norms are summed; () if not sharded
    xs: list[Tensor] = field(default_factory=list)
    ds: list[Tensor] = field(default_factory=list)
    gs: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    def pieces(self, limit: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        for i, (x, d) in enumerate(zip(self.xs, self.ds)):
            size, g = x.numel(), self.gs[i] if self.has_grad else None
            if 0 < size <= limit:
                yield x, d, g
            elif size and g is not None:
                yield from blocks(limit, x, d, g)  # type: ignore[misc]
            elif size:
                yield from ((x_, d_, None) for x_, d_ in blocks(limit, x, d))

    def gradient(self, x: Tensor, g: Tensor | None) -> Tensor | None:
        """The gradient of what is minimized, as precise as d; None stands for zero."""
        wide = self.ds[0].dtype
        if g is not None:
            g = (-g if self.sign < 0 else g).to(wide)
        # Beyond the paper: L2 regularisation is part of the objective, and so of its gradient.
        if self.l2:
            g = x.to(wide) * self.l2 if g is None else torch.add(g, x, alpha=self.l2)
        return g

    def probes(self) -> list[Part]:
        return [(self.bucket, self.process_groups, part) for part in self.kernels.probe(self)]


Squares = tuple[list[Tensor], list[Tensor]]  # parts of |g|^2 and of |d|^2


class Kernels(Protocol):
    """One way of running the passes."""

    def move(self, batch: Batch) -> None: ...

    def estimate(self, batch: Batch, *, first: bool, guard: bool) -> Squares:
        """`first`: d <- g. `guard`: leave d alone where g is not finite."""
        ...

    def probe(self, batch: Batch) -> list[Tensor]:
        """Numbers that are finite if and only if the gradients are, in one read of them."""
        ...


def finite_part(g: Tensor) -> Tensor:
    return torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0)


def finite_probe(g: Tensor) -> Tensor:
    """A number that is finite if and only if g is."""
    if g.device.type == "cpu":  # reading a number costs nothing here
        total = g.sum()
        if math.isfinite(total.item()):
            return total
    return (g * 0).sum()  # 0, or nan: unlike the sum itself it cannot overflow


def guarded(g: Tensor, g_sq: Tensor) -> Tensor:
    """The finite part of g, whose squared norm is known."""
    if g.device.type == "cpu" and math.isfinite(g_sq.item()):  # reading it costs nothing here
        return g
    return finite_part(g)


def undo_estimate(batch: Batch) -> None:
    """Take a guarded estimate back, to one rounding of g + (1 - a) d.

    Where g is so large that d was lost beside it, d comes back as zero: the same sample's
    gradient, when it is evaluated again, hides d in the same way. Where a is 1 it does so too,
    and counts for nothing.
    """
    for x, d, g_raw in batch.pieces(BLOCK):
        g = batch.gradient(x, g_raw)
        d.copy_(finite_part((d if g is None else d - finite_part(g)) / batch.keep))


class Plain:
    """Block by block, so that the second operation finds its operands in the cache."""

    def move(self, batch: Batch) -> None:
        for x, d, g_raw in batch.pieces(BLOCK):
            g_tilde = batch.gradient(x, g_raw)  # before x moves
            # Beyond the paper: weight decay beside the objective, if asked for.
            step = torch.add(d, x, alpha=batch.decoupled) if batch.decoupled else d
            if x.dtype == step.dtype:
                x.addcmul_(step, batch.alpha, value=-1)  # Alg. 1, line 4
            else:
                x.sub_(step * batch.alpha)  # Alg. 1, line 4, half-precision x
            if g_tilde is not None:
                d.sub_(g_tilde)  # Alg. 1, line 6: the bracket

    def estimate(self, batch: Batch, *, first: bool, guard: bool) -> Squares:
        g_sq: list[Tensor] = []
        d_sq: list[Tensor] = []
        scratch = scratch_for(batch.ds, BLOCK) if batch.ds else None
        for x, d, g_raw in batch.pieces(BLOCK):
            g = batch.gradient(x, g_raw)
            if g is not None:
                g_sq.append(square_norm(g, scratch))
            if first:
                d.zero_() if g is None else d.copy_(g)  # Alg. 1, line 1
            elif g is None:
                d.mul_(batch.keep)  # Alg. 1, line 6, with g_{t+1} = 0
            else:
                g = guarded(g, g_sq[-1]) if guard else g
                torch.addcmul(g, d, batch.keep.to(d.dtype), out=d)  # Alg. 1, line 6
            d_sq.append(square_norm(d, scratch))
        return g_sq, d_sq

    def probe(self, batch: Batch) -> list[Tensor]:
        return [finite_probe(g) for g in batch.gs if g.numel() > 0]


class Foreach:
    """torch's multi-tensor operations, on lists that stay below the largest tensor."""

    def move(self, batch: Batch) -> None:
        for xs, ds, gs_raw in self._lists(batch):
            g_tildes = self._gradients(batch, xs, gs_raw)
            steps = torch._foreach_add(ds, xs, alpha=batch.decoupled) if batch.decoupled else ds
            torch._foreach_sub_(xs, torch._foreach_mul(steps, batch.alpha))  # Alg. 1, line 4
            if g_tildes:
                torch._foreach_sub_(ds, g_tildes)  # Alg. 1, line 6: the bracket

    def estimate(self, batch: Batch, *, first: bool, guard: bool) -> Squares:
        g_sq: list[Tensor] = []
        d_sq: list[Tensor] = []
        for xs, ds, gs_raw in self._lists(batch):
            gs = self._gradients(batch, xs, gs_raw)
            if first:
                torch._foreach_copy_(ds, gs) if gs else torch._foreach_zero_(ds)  # Alg. 1, line 1
            else:
                torch._foreach_mul_(ds, batch.keep)
                if gs:  # Alg. 1, line 6
                    torch._foreach_add_(ds, [finite_part(g) for g in gs] if guard else gs)
            g_sq += self._square_norms(gs)
            d_sq += self._square_norms(ds)
        return g_sq, d_sq

    def probe(self, batch: Batch) -> list[Tensor]:
        gs = [g for g in batch.gs if g.numel() > 0]
        if not gs or gs[0].device.type == "cpu":
            return Plain().probe(batch)
        return list(torch._foreach_norm(gs, math.inf))  # nan is the largest of all

    @staticmethod
    def _lists(batch: Batch) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        limit = max(BLOCK, max(x.numel() for x in batch.xs) // 4)
        xs: list[Tensor] = []
        ds: list[Tensor] = []
        gs: list[Tensor] = []
        size = 0
        for x, d, g in batch.pieces(limit):
            if size and size + x.numel() > limit:
                yield xs, ds, gs
                xs, ds, gs, size = [], [], [], 0
            xs.append(x)
            ds.append(d)
            if g is not None:
                gs.append(g)
            size += x.numel()
        if size:
            yield xs, ds, gs

    @staticmethod
    def _gradients(batch: Batch, xs: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
        """As `Batch.gradient`; an empty list stands for zero."""
        wide = batch.ds[0].dtype
        if gs and batch.sign < 0:
            gs = list(torch._foreach_neg(gs))
        gs = [g.to(wide) for g in gs]
        if batch.l2 and not gs:
            return list(torch._foreach_mul([x.to(wide) for x in xs], batch.l2))
        return list(torch._foreach_add(gs, xs, alpha=batch.l2)) if batch.l2 else gs

    @staticmethod
    def _square_norms(tensors: list[Tensor]) -> list[Tensor]:
        if not tensors:
            return []
        if tensors[0].device.type == "cpu":
            return [square_norm(t) for t in tensors]
        dtype = accumulator_dtype(tensors[0].device)
        return list(torch._foreach_pow(torch._foreach_norm(tensors, 2, dtype=dtype), 2))
