"""The passes as compiled kernels: each tensor is read once and written once.

`torch.compile` builds three small kernels with dynamic shapes, once for each pair of
dtypes, whatever the number of tensors. All numbers reach them in one tensor, so that a
schedule or another parameter group never compiles anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stormplus.torch.kernels import Batch, Plain, Squares
from stormplus.torch.norms import accumulator_dtype, flat_views

# Calling a kernel costs as much as running it on this many elements; smaller tensors are
# joined first.
SMALL = 1 << 15


def _move(x: Tensor, d: Tensor, g: Tensor, numbers: Tensor) -> None:
    alpha, keep, sign, l2, decoupled, _ = numbers.to(d.dtype).unbind()
    wide = x.to(d.dtype)
    g_tilde = sign * g.to(d.dtype) + l2 * wide
    x_new = wide - alpha * (d + decoupled * wide)  # Alg. 1, line 4
    d.copy_(keep * (d - g_tilde))  # Alg. 1, line 6: the part known before g_{t+1}
    x.copy_(x_new)


def _estimate(x: Tensor, d: Tensor, g: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    _, _, sign, l2, _, guard = numbers.to(d.dtype).unbind()
    g = sign * g.to(d.dtype) + l2 * x.to(d.dtype)
    d_new = d + torch.where(torch.isfinite(g) | (guard == 0), g, 0)  # Alg. 1, line 6
    d.copy_(d_new)
    wide_g, wide_d = (t.to(accumulator_dtype(t.device)) for t in (g, d_new))
    return (wide_g * wide_g).sum(), (wide_d * wide_d).sum()


def _square(x: Tensor, d: Tensor, g: Tensor, numbers: Tensor) -> Tensor:
    _, _, sign, l2, _, _ = numbers.to(d.dtype).unbind()
    wide = (sign * g.to(d.dtype) + l2 * x.to(d.dtype)).to(accumulator_dtype(g.device))
    return (wide * wide).sum()


@cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(kernel, dynamic=True, fullgraph=True)

    def call(*tensors: Tensor) -> Any:
        try:
            return compiled(*tensors)
        except Exception as error:  # before any tensor has been touched
            # By name: importing the compiler's errors costs every user two seconds.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise RuntimeError(
                "fused=True could not compile its kernels: install a C++ compiler that "
                "torch.compile finds, or leave fused=True out"
            ) from error

    return call


class Fused:
    """One kernel call for each large tensor, one for many small ones together.

    What the kernels cannot take goes the plain way: a missing gradient, strides that
    differ, the very first estimate, and everything while a dispatch mode of the user's
    (a FLOP counter, fake tensors) looks on.
    """

    def __init__(self) -> None:
        self._plain = Plain()

    def move(self, batch: Batch) -> None:
        numbers = _numbers(batch)
        for flat in _flat(batch):
            x, d, g = flat.tensors
            _compiled(_move)(x, d, g, numbers)
            flat.write_back(x, d)
        self._plain.move(_rest(batch))
        torch.autograd.graph.increment_version(batch.xs)  # .data has hidden the change

    def estimate(self, batch: Batch, *, first: bool, guard: bool) -> Squares:
        if first:
            return self._plain.estimate(batch, first=True, guard=guard)
        numbers = _numbers(batch, guard=guard)
        g_sq, d_sq = self._plain.estimate(_rest(batch), first=False, guard=guard)
        for flat in _flat(batch):
            x, d, g = flat.tensors
            for squares, part in zip((g_sq, d_sq), _compiled(_estimate)(x, d, g, numbers)):
                squares.append(part)
            flat.write_back(None, d)
        return g_sq, d_sq

    def squares(self, batch: Batch) -> list[Tensor]:
        numbers = _numbers(batch)
        parts = [_compiled(_square)(*flat.tensors, numbers) for flat in _flat(batch)]
        return parts + self._plain.squares(_rest(batch))


class _Flat(NamedTuple):
    """One-dimensional x, d and g: a view of one tensor, or small tensors joined."""

    tensors: tuple[Tensor, ...]
    members: list[tuple[Tensor, ...]]  # the views that were joined; none if it is a view

    def write_back(self, x: Tensor | None, d: Tensor) -> None:
        for position, joined in enumerate((x, d)):
            if joined is not None and self.members:
                targets = [member[position] for member in self.members]
                sizes = [t.numel() for t in targets]
                torch._foreach_copy_(targets, list(torch.split(joined, sizes)))


def _views(batch: Batch, i: int) -> tuple[Tensor, ...] | None:
    """Flat views of the i-th x, d and g, or None if the kernels cannot take them."""
    if not batch.has_grad or torch._C._len_torch_dispatch_stack():
        return None
    return flat_views(batch.xs[i], batch.ds[i], batch.gs[i])


def _rest(batch: Batch) -> Batch:
    left = [i for i in range(len(batch.xs)) if _views(batch, i) is None]
    gs = [batch.gs[i] for i in left] if batch.has_grad else []
    return replace(batch, xs=[batch.xs[i] for i in left], ds=[batch.ds[i] for i in left], gs=gs)


def _flat(batch: Batch) -> Iterator[_Flat]:
    limit = max(SMALL, max(x.numel() for x in batch.xs) // 4)
    small: list[tuple[Tensor, ...]] = []
    size = 0
    for i, x in enumerate(batch.xs):
        views = _views(batch, i)
        if views is None or x.numel() == 0:
            continue
        # Without .data the compiler would look through the view at the tensor's shape, and
        # compile a kernel for each.
        views = tuple(t.data for t in views)
        if x.numel() > SMALL:
            yield _Flat(views, [])
            continue
        if small and size + x.numel() > limit:
            yield _joined(small)
            small, size = [], 0
        small.append(views)
        size += x.numel()
    if small:
        yield _joined(small)


def _joined(small: list[tuple[Tensor, ...]]) -> _Flat:
    return _Flat(tuple(torch.cat(part) for part in zip(*small)), small)


def _numbers(batch: Batch, *, guard: bool = True) -> Tensor:
    constants = (batch.sign, batch.l2, batch.decoupled, float(guard))
    filled = [batch.alpha.new_full((), value) for value in constants]  # without a copy from here
    return torch.stack([batch.alpha, batch.keep, *filled])
