"""The passes as compiled kernels: each tensor is read once and written once.

`torch.compile` builds three small kernels with dynamic shapes, once for each pair of
dtypes, whatever the number of tensors. All numbers reach them in one tensor, so that a
schedule or another parameter group never compiles anything again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stormplus.torch.core.kernels import (
    Number,
    Plain,
    flat_views,
    increment_version,
    objective,
    tensor_of,
)
from stormplus.torch.core.state import accumulator_dtype
from stormplus.torch.core.tensors import Bundle

# Calling a kernel costs as much as running it on this many elements; smaller tensors are
# joined first.
SMALL = 1 << 15


def _move(x: Tensor, d: Tensor, g: Tensor, numbers: Tensor) -> None:
    alpha, sign, l2, decoupled, _ = numbers.to(d.dtype).unbind()
    wide = x.to(d.dtype)
    g_tilde = sign * g.to(d.dtype) + l2 * wide
    x_new = wide - alpha * (d + decoupled * wide)  # Alg. 1, line 4
    d.copy_(d - g_tilde)  # Alg. 1, line 6: the bracket
    x.copy_(x_new)


def _estimate(x: Tensor | None, d: Tensor, g: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    keep, sign, l2, _, guard = numbers.to(d.dtype).unbind()
    g = sign * g.to(d.dtype)
    if x is not None:  # compiled apart, so that x is read only where it counts
        g = g + l2 * x.to(d.dtype)
    d_new = torch.where(torch.isfinite(g) | (guard == 0), g, 0) + keep * d  # Alg. 1, line 6
    d.copy_(d_new)
    wide_g, wide_d = (t.to(accumulator_dtype(t.device)) for t in (g, d_new))
    return (wide_g * wide_g).sum(), (wide_d * wide_d).sum()


def _probe(g: Tensor) -> Tensor:
    return (g * 0).sum()  # 0, or nan


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


class Compiled:
    """One kernel call for each large tensor, one for many small ones together.

    What the kernels cannot take goes the plain way: a missing gradient, strides that
    differ, the very first estimate, and everything while a dispatch mode of the user's
    (a FLOP counter, fake tensors) looks on.
    """

    def __init__(self) -> None:
        self._plain = Plain()

    def probe(self, bundle: Bundle) -> Number:
        def large(g: Tensor | None) -> bool:
            return g is not None and g.numel() > SMALL and g.is_contiguous()

        watched = bool(torch._C._len_torch_dispatch_stack())
        rest = [item for item in bundle.items if watched or not large(item.g)]
        found = self._plain.probe(bundle.with_items(rest))
        for item in () if watched else bundle.items:
            if item.g is not None and large(item.g):
                found = found + _compiled(_probe)(item.g.view(-1).data)
        return found

    def move(self, bundle: Bundle, alpha: Number) -> None:
        flats, rest = _sort(bundle)
        alpha = tensor_of(alpha, bundle.device)
        numbers = _numbers(bundle, alpha)
        for flat in flats:
            with flat as (x, d, g):
                _compiled(_move)(x, d, g, numbers)
        self._plain.move(rest, alpha)
        increment_version([item.x for item in bundle.items])

    def estimate(
        self, bundle: Bundle, keep: Number, out: Tensor, *, first: bool, guard: bool
    ) -> None:
        keep = tensor_of(keep, bundle.device)
        if first:
            self._plain.estimate(bundle, keep, out, first=True, guard=guard)
            return
        flats, rest = _sort(bundle)
        self._plain.estimate(rest, keep, out, first=False, guard=guard)
        numbers = _numbers(bundle, keep, guard=guard)
        totals = out.unbind()
        for flat in flats:
            with flat as (x, d, g):
                squares = _compiled(_estimate)(x if objective(bundle).l2 else None, d, g, numbers)
            for total, square in zip(totals, squares):
                total.add_(square)


COMPILED = Compiled()


class _Flat:
    """One-dimensional x, d and g: views of one parameter's, or small ones joined.

    As a context it gives the tensors, and writes joined ones back when it is left.
    """

    def __init__(self, *members: tuple[Tensor, ...]) -> None:
        self.members = list(members)
        self.size = sum(views[0].numel() for views in members)

    def add(self, views: tuple[Tensor, ...]) -> None:
        self.members.append(views)
        self.size += views[0].numel()

    def __enter__(self) -> tuple[Tensor, ...]:
        joined = len(self.members) > 1
        parts = zip(*self.members)
        self.tensors = tuple(torch.cat(part) for part in parts) if joined else self.members[0]
        return self.tensors

    def __exit__(self, *error: object) -> None:
        if len(self.members) > 1:
            for joined, targets in zip(self.tensors[:2], list(zip(*self.members))[:2]):
                sizes = [t.numel() for t in targets]
                torch._foreach_copy_(list(targets), list(torch.split(joined, sizes)))


def _sort(bundle: Bundle) -> tuple[list[_Flat], Bundle]:
    """What the kernels take, and a bundle of what is left."""
    if not bundle.has_grad or torch._C._len_torch_dispatch_stack():
        return [], bundle
    flats: list[_Flat] = []
    rest = bundle.with_items([])
    small = _Flat()
    limit = max(SMALL, max((item.x.numel() for item in bundle.items), default=0) // 4)
    for item in bundle.items:
        size = item.x.numel()
        if size == 0 or item.g is None:
            continue
        views = flat_views(item.x, *item.buffers, item.g)
        if views is None:
            rest.items.append(item)
            continue
        # Without .data the compiler would look through the view at the tensor's shape, and
        # compile a kernel for each.
        views = tuple(t.data for t in views)
        if size > SMALL:
            flats.append(_Flat(views))
            continue
        if small.members and small.size + size > limit:
            flats.append(small)
            small = _Flat()
        small.add(views)
    return flats + [small] * bool(small.members), rest


def _numbers(bundle: Bundle, coefficient: Tensor, *, guard: bool = True) -> Tensor:
    """What a kernel reads: alpha or 1 - a, and what both passes share."""
    constants = (*objective(bundle), float(guard))
    filled = [coefficient.new_full((), c) for c in constants]  # without a copy from the host
    return torch.stack([coefficient, *filled])
