"""The passes as compiled kernels: each tensor is read once and written once.

`torch.compile` builds three small kernels with dynamic shapes, once for each pair of
dtypes, whatever the number of tensors. All numbers reach them in one tensor, so that a
schedule or another parameter group never compiles anything again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stormplus.torch.kernels import Batch, Plain, Squares
from stormplus.torch.norms import accumulator_dtype

# Calling a kernel costs as much as running it on this many elements; smaller tensors are
# joined first.
SMALL = 1 << 15


def _move(x: Tensor, d: Tensor, g: Tensor, numbers: Tensor) -> None:
    alpha, keep, sign, l2, decoupled = numbers.to(d.dtype).unbind()
    wide = x.to(d.dtype)
    g_tilde = sign * g.to(d.dtype) + l2 * wide
    x_new = wide - alpha * (d + decoupled * wide)  # Alg. 1, line 4
    d.copy_(keep * (d - g_tilde))  # Alg. 1, line 6: the part known before g_{t+1}
    x.copy_(x_new)


def _estimate(x: Tensor, d: Tensor, g: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    _, _, sign, l2, _ = numbers.to(d.dtype).unbind()
    g = sign * g.to(d.dtype) + l2 * x.to(d.dtype)
    d_new = d + torch.where(torch.isfinite(g), g, 0)  # Alg. 1, line 6
    d.copy_(d_new)
    wide_g, wide_d = (t.to(accumulator_dtype(t.device)) for t in (g, d_new))
    return (wide_g * wide_g).sum(), (wide_d * wide_d).sum()


def _square(x: Tensor, d: Tensor, g: Tensor, numbers: Tensor) -> Tensor:
    _, _, sign, l2, _ = numbers.to(d.dtype).unbind()
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
    """One kernel call for each large tensor, one for all the small ones together.

    The rare cases (a missing gradient, strides that differ, the very first estimate) take
    the plain path.
    """

    def __init__(self) -> None:
        self._plain = Plain()

    def move(self, batch: Batch) -> None:
        large, small, rest = _sorted(batch)
        numbers = _numbers(batch)
        for x, d, g in large:
            _compiled(_move)(x, d, g, numbers)
        if small:
            xs, ds, gs = zip(*small)
            x, d, g = (torch.cat(part) for part in (xs, ds, gs))
            _compiled(_move)(x, d, g, numbers)
            _write_back(xs, x)
            _write_back(ds, d)
        self._plain.move(rest)
        torch.autograd.graph.increment_version(batch.xs)  # .data has hidden the change

    def estimate(self, batch: Batch, *, first: bool, guard: bool) -> Squares:
        if first:
            return self._plain.estimate(batch, first=True, guard=guard)
        large, small, rest = _sorted(batch)
        numbers = _numbers(batch)
        squares = [_compiled(_estimate)(x, d, g, numbers) for x, d, g in large]
        if small:
            xs, ds, gs = zip(*small)
            x, d, g = (torch.cat(part) for part in (xs, ds, gs))
            squares.append(_compiled(_estimate)(x, d, g, numbers))
            _write_back(ds, d)
        g_sq, d_sq = self._plain.estimate(rest, first=False, guard=True)
        return g_sq + [g for g, _ in squares], d_sq + [d for _, d in squares]

    def squares(self, batch: Batch) -> list[Tensor]:
        large, small, rest = _sorted(batch)
        if small:
            x, d, g = (torch.cat(part) for part in zip(*small))
            large.append((x, d, g))
        numbers = _numbers(batch)
        return [_compiled(_square)(*tensors, numbers) for tensors in large] + self._plain.squares(
            rest
        )


Flat = tuple[Tensor, Tensor, Tensor]


def _sorted(batch: Batch) -> tuple[list[Flat], list[Flat], Batch]:
    """Flat views of large and of small tensors, and a batch of what has no flat view."""
    large: list[Flat] = []
    small: list[Flat] = []
    rest = replace(batch, xs=[], ds=[], gs=[])
    if not batch.has_grad:
        return large, small, batch
    for tensors in zip(batch.xs, batch.ds, batch.gs):
        if tensors[0].numel() == 0:  # a shard that is empty here; the compiler would start anew
            continue
        if all(t.is_contiguous() for t in tensors):
            # Without .data the compiler would look through the view at the tensor's shape,
            # and compile a kernel for each.
            x, d, g = (t.view(-1).data for t in tensors)
            (large if x.numel() > SMALL else small).append((x, d, g))
        else:
            for part, t in zip((rest.xs, rest.ds, rest.gs), tensors):
                part.append(t)
    return large, small, rest


def _numbers(batch: Batch) -> Tensor:
    constants = batch.alpha.new_tensor([batch.sign, batch.l2, batch.decoupled])
    return torch.cat([batch.alpha.view(1), batch.keep.view(1), constants])


def _write_back(targets: tuple[Tensor, ...], joined: Tensor) -> None:
    torch._foreach_copy_(list(targets), list(torch.split(joined, [t.numel() for t in targets])))
