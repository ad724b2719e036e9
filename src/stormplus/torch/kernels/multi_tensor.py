"""The passes on lists of tensors, in pure torch; the number of launches does not depend on them.

The portable backend: it runs on any device that torch has, never waits for it, and can be traced by
torch.compile. Tensors are copied into one padded matrix, in which every tensor has rows of its own;
the arithmetic is that of plain.py, with a column of factors; then the results are copied back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stormplus.torch._sharding import Sample, is_dense
from stormplus.torch._tensors import Number, Numbers, TensorGroup, accumulator_dtype, wide_dtype
from stormplus.torch.kernels import plain
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus.untuned_rule import INTERPOLATION

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides

_WIDTH = 1024  # elements in a row of the matrix
# Elements that are copied at a time, unless one tensor has more: fewer would mean more launches on
# a device, more would leave the cache of a CPU.
_SLAB, _CPU_SLAB = 1 << 25, 1 << 18


def any_nonfinite(group: TensorGroup) -> Any:
    """See plain.py."""
    norms = torch._foreach_norm(group.grads, math.inf)  # NaN is the largest
    largest = torch.stack(norms).amax()
    return largest - largest != 0


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """See plain.py."""
    for part, rows in _slabs(group):
        lists = part.params, part.estimators
        x, d, g = rows.gather([*lists, part.grads], part.estimators[0].dtype)
        plain.move(dataclasses.replace(part, params=[x], grads=[g], estimators=[d]), alpha, skip)
        rows.scatter(lists, (x, d))


def estimate(
    group: TensorGroup, one_minus_a: Number, *, first: bool, finite_only: bool, skip: Any = None
) -> tuple[Number, Number]:
    """See plain.py."""
    norms, options = [], {"first": first, "finite_only": finite_only, "skip": skip}
    for part, rows in _slabs(group):
        lists = part.params, part.estimators, part.grads
        x, d, g = rows.gather(lists, part.estimators[0].dtype)
        matrices = dataclasses.replace(part, params=[x], grads=[g], estimators=[d])
        norms.append(plain.estimate(matrices, one_minus_a, **options))
        rows.scatter([part.estimators], [d])
    g_sq, d_sq = norms[0] if len(norms) == 1 else (torch.stack(s).sum() for s in zip(*norms))
    return g_sq, d_sq


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> tuple[Numbers, Numbers]:
    """See plain.py."""
    x_dtype, dtype = group.params[0].dtype, wide_dtype(group.params[0].dtype)
    factors = torch.stack(plain.untuned_factors(coefficients)).to(dtype)
    sums, done = [], 0
    for part, rows in _slabs(group):
        slab = slice(done, done + len(part.params))
        done = slab.stop
        lists = [part.params, part.z_minus_x, part.grad_rms]
        if part.masters:
            (x,) = rows.gather([part.params], x_dtype)
            lists.append(part.masters)
            e, s, master, g = rows.gather([*lists[1:], part.grads], dtype)
            y, old = plain.full_precision(x, master), [x, e, s, master]
        else:
            y, e, s, g = rows.gather([*lists, part.grads], dtype)
            old = [y, e, s]
        by = plain.UntunedFactors(*factors[:, slab][:, rows.owner].unsqueeze(-1).unbind())
        y, e, s, u = plain.untuned_update(y, g, e, s, by)
        if part.z_minus_x[0].dtype != dtype:
            place = rows.places.unsqueeze(-1) + torch.arange(_WIDTH, device=group.device)
            step = coefficients.step[slab][rows.owner].unsqueeze(-1)
            e, s = plain.stochastic_round(torch.stack([e, s]), step, place & 0xFFFFFFFF).unbind()
        new = [y, e, s]
        if part.masters:
            new.append(y)
            y = y + 0 * y.to(x_dtype).to(dtype)  # infinite if x overflows
        wide = accumulator_dtype(group.device)
        u_sq = torch.zeros(len(part.params), dtype=wide, device=group.device)
        u_sq.index_add_(0, rows.owner, u.square().sum(1, dtype=wide))
        sums.append((u_sq, rows.squared_displacements(part, y, e)))
        if skip is not None:
            new = [torch.where(skip, a, b.to(a.dtype)) for a, b in zip(old, new)]
        rows.scatter(lists, new)
    u_sq, moved_sq = sums[0] if len(sums) == 1 else (torch.cat(parts) for parts in zip(*sums))
    return u_sq, moved_sq


class _Rows:
    """Which rows of the matrix belong to which tensor.

    Attributes:
        owner: The tensor of each row.
        places: The place in its whole tensor of the first element of each row.
    """

    def __init__(
        self, layouts: tuple[_Layout, ...], samples: tuple[Sample, ...], device: torch.device
    ) -> None:
        self.sizes = [math.prod(shape) for shape, _ in layouts]
        counts = [-(-size // _WIDTH) for size in self.sizes]
        self.layouts, self.device, self.total = layouts, device, sum(counts)
        self.starts = [_WIDTH * sum(counts[:i]) for i in range(len(counts))]
        owner = _repeated(counts)
        offsets = [sample.offset for sample in samples] or [0] * len(counts)
        first = torch.tensor([a - b for a, b in zip(self.starts, offsets)], device="cpu")
        places = _WIDTH * torch.arange(self.total, device="cpu") - first[owner]
        self.owner, self.places = self._upload(owner), self._upload(places)
        if not samples:
            return
        none = torch.arange(0, device="cpu")
        sampled = [
            start + (sample.places(*layout) if sample.stride else none)
            for sample, layout, start in zip(samples, layouts, self.starts)
        ]
        self._sample_counts = [len(here) for here in sampled]
        self._sampled = self._upload(torch.cat(sampled))
        self._sample_owner = self._upload(_repeated(self._sample_counts))

    def _upload(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, non_blocking=True)

    def gather(self, lists: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the matrices of some lists of tensors, padded with zeros."""
        if len(lists) > 1 and len({t.dtype for tensors in lists for t in tensors}) > 1:
            return [self.gather([tensors], dtype)[0] for tensors in lists]
        padding = torch.zeros(_WIDTH, dtype=lists[0][0].dtype, device=self.device)
        pieces = []
        for tensors in lists:
            for t, size, layout in zip(tensors, self.sizes, self.layouts):
                pieces += [_flat(t, layout), padding[: -size % _WIDTH]]
        return torch.cat(pieces).view(len(lists), self.total, _WIDTH).to(dtype).unbind()

    def scatter(self, lists: Sequence[list[Tensor]], matrices: Sequence[Tensor]) -> None:
        """Write matrices into lists of tensors, with one copy per dtype."""
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for tensors, matrix in zip(lists, matrices):
            targets, sources = copies.setdefault(tensors[0].dtype, ([], []))
            flat = matrix.to(tensors[0].dtype).reshape(-1)
            targets += tensors
            for (shape, strides), start, size in zip(self.layouts, self.starts, self.sizes):
                sources.append(flat[start : start + size].as_strided(shape, strides))
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)

    def squared_displacements(self, group: TensorGroup, y: Tensor, e: Tensor) -> Tensor:
        """Return |z - z_1|^2 over the sample of each tensor."""
        lists = zip(group.samples, group.initial_sample, self._sample_counts)
        z_1 = torch.cat([sample.part(whole, n) if n else whole[:0] for sample, whole, n in lists])
        z = y.view(-1)[self._sampled] + INTERPOLATION * e.view(-1)[self._sampled].to(y.dtype)
        squares = (z - z_1).to(accumulator_dtype(y.device)).square()
        return squares.new_zeros(len(group.params)).index_add_(0, self._sample_owner, squares)


def _slabs(group: TensorGroup) -> Iterator[tuple[TensorGroup, _Rows]]:
    """Yield parts of the group that are handled together, and their rows."""
    limit = _CPU_SLAB if group.device.type == "cpu" else _SLAB
    sizes, start, size = [p.numel() for p in group.params], 0, 0
    for end in range(1, len(sizes) + 1):
        size += sizes[end - 1]
        if end == len(sizes) or size + sizes[end] > limit:
            part, start, size = group.slice(start, end), end, 0
            layouts = tuple(_layout(p) for p in part.params)
            # Tensors made under a FakeTensorMode or torch.compile must not be used later.
            fake = torch.compiler.is_compiling() or hasattr(group.params[0], "fake_mode")
            make = _Rows if fake else _cached_rows
            yield part, make(layouts, tuple(part.samples), group.device)


_cached_rows = lru_cache(maxsize=64)(_Rows)


def _layout(p: Tensor) -> _Layout:
    shape = tuple(p.shape)
    own = not p.is_contiguous() and is_dense(p)
    return shape, p.stride() if own else _contiguous_strides(shape)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _flat(t: Tensor, layout: _Layout) -> Tensor:
    """Return the elements of t in the order of memory of a layout."""
    shape, memory = layout
    if t.is_contiguous() and memory == _contiguous_strides(shape):
        return t.view(-1)
    if t.stride() != memory:
        t = torch.empty_strided(shape, memory, dtype=t.dtype, device=t.device).copy_(t)
    return t.as_strided((t.numel(),), (1,))


def _repeated(counts: Sequence[int]) -> Tensor:
    """Return 0 as often as the first count says, 1 as often as the second, and so on."""
    numbers, repeats = torch.arange(len(counts), device="cpu"), torch.tensor(counts, device="cpu")
    return numbers.repeat_interleave(repeats, output_size=sum(counts))
