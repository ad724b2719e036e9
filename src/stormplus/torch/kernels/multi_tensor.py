"""The passes on lists of tensors, in pure torch; the number of launches does not depend on them.

The portable backend: it runs on any device that torch has, never waits for it, and can be traced by
torch.compile. Tensors are copied into one padded matrix, in which every tensor has rows of its own;
the arithmetic is that of plain.py, with a column of coefficients; then the results are copied back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stormplus.torch._sharding import SampledCoordinates
from stormplus.torch._tensors import Number, Numbers, TensorGroup, accumulator_dtype
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
    norms = torch._foreach_norm(group.grads, math.inf)
    return ~(torch.stack(norms) < math.inf).all()  # NaN compares False


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """See plain.py."""
    for part, rows in _slabs(group):
        lists = part.params, part.estimators
        x, d, g = rows.gather(*lists, part.grads)
        g_tilde = plain.objective_gradient(x.to(d.dtype), g, group.sign, group.l2)
        rows.scatter(lists, (x, d), plain.moved(x, g_tilde, d, alpha), skip)


def estimate(
    group: TensorGroup, one_minus_a: Number, *, first: bool, finite_only: bool, skip: Any = None
) -> tuple[Number, Number]:
    """See plain.py."""
    norms = []
    for part, rows in _slabs(group):
        x, d, g = rows.gather(part.params, part.estimators, part.grads)
        gradient = plain.objective_gradient(x.to(d.dtype), g, group.sign, group.l2)
        new = plain.estimated(gradient, d, one_minus_a, first=first, finite_only=finite_only)
        rows.scatter([part.estimators], [d], [new], skip)
        norms.append((plain.square_norm(gradient), plain.square_norm(new)))
    g_sq, d_sq = (reduce(torch.add, squares) for squares in zip(*norms))
    return g_sq, d_sq


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> tuple[Numbers, Numbers]:
    """See plain.py."""
    sums, done, wide = [], 0, accumulator_dtype(group.device)
    table = torch.stack(coefficients)
    for part, rows in _slabs(group):
        lists = [part.params, part.z_minus_x, part.grad_rms]
        if part.masters:
            lists.append(part.masters)
        g, *old = rows.gather(part.grads, *lists)
        x, old_e, old_s, *master = old
        y = plain.full_precision(x, *master)
        of_rows = table[:, done : done + len(part.params)][:, rows.owner].unsqueeze(-1)
        of_y = UntunedCoefficients(*of_rows.to(y.dtype).unbind())
        y, e, s, u = plain.untuned_update(y, g, old_e, old_s, of_y)
        if e.dtype != old_e.dtype:
            place = rows.places.unsqueeze(-1) + torch.arange(_WIDTH, device=group.device)
            step = UntunedCoefficients(*of_rows).step
            e, s = plain.stochastic_round(torch.stack([e, s]), step, place & 0xFFFFFFFF)
        new_x = y.to(x.dtype)
        rows.scatter(lists, old, (new_x, e, s, y), skip)
        if master:
            y = y + 0 * new_x  # make y non-finite where the half-precision x overflowed
        u_sq = torch.zeros(len(part.params), dtype=wide, device=group.device)
        u_sq.index_add_(0, rows.owner, u.square().sum(1, dtype=wide))
        sums.append((u_sq, rows.squared_displacements(part, y, e)))
        done += len(part.params)
    u_sq, moved_sq = sums[0] if len(sums) == 1 else (torch.cat(parts) for parts in zip(*sums))
    return u_sq, moved_sq


class _Rows:
    """Which rows of the matrix belong to which tensor.

    Attributes:
        owner: The tensor of each row.
        places: The place in its whole tensor of the first element of each row.
    """

    def __init__(
        self,
        layouts: tuple[_Layout, ...],
        coordinates: tuple[SampledCoordinates, ...],
        device: torch.device,
    ) -> None:
        self.sizes = [math.prod(shape) for shape, _ in layouts]
        counts = [-(-size // _WIDTH) for size in self.sizes]
        self.layouts, self.device = layouts, device
        self.starts = [_WIDTH * sum(counts[:i]) for i in range(len(counts))]
        self._padding: dict[torch.dtype, Tensor] = {}
        owner = _repeated(counts)
        offsets = [sampled.offset for sampled in coordinates] or [0] * len(counts)
        first = torch.tensor([a - b for a, b in zip(self.starts, offsets)], device="cpu")
        places = _WIDTH * torch.arange(len(owner), device="cpu") - first[owner]
        self.owner, self.places = self._upload(owner), self._upload(places)
        in_matrix = [
            start + sampled.places(*layout) if sampled.stride else owner[:0]
            for sampled, layout, start in zip(coordinates, layouts, self.starts)
        ]
        if in_matrix:
            self._sampled_counts = [len(here) for here in in_matrix]
            self._sampled = self._upload(torch.cat(in_matrix))
            self._sampled_owner = self._upload(_repeated(self._sampled_counts))

    def _upload(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, non_blocking=True)

    def gather(self, *lists: Sequence[Tensor]) -> list[Tensor]:
        """Return the matrices of some lists of tensors, padded with zeros; one copy per dtype."""
        pieces: dict[torch.dtype, list[Tensor]] = {}
        for tensors in lists:
            dtype = tensors[0].dtype
            if dtype not in self._padding:
                self._padding[dtype] = torch.zeros(_WIDTH, dtype=dtype, device=self.device)
            for t, size, layout in zip(tensors, self.sizes, self.layouts):
                padding = self._padding[dtype][: -size % _WIDTH]
                pieces.setdefault(dtype, []).extend([_flat(t, layout), padding])
        matrices = {
            dtype: iter(torch.cat(flat).view(-1, len(self.owner), _WIDTH).unbind())
            for dtype, flat in pieces.items()
        }
        return [next(matrices[tensors[0].dtype]) for tensors in lists]

    def scatter(
        self,
        lists: Sequence[Sequence[Tensor]],
        old: Sequence[Tensor],
        new: Sequence[Tensor],
        skip: Tensor | None,
    ) -> None:
        """Write new matrices into lists of tensors, or old ones to skip; one copy per dtype."""
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for tensors, before, after in zip(lists, old, new):
            matrix = after.to(before.dtype)
            if skip is not None:
                matrix = torch.where(skip, before, matrix)
            flat = matrix.reshape(-1)
            targets, sources = copies.setdefault(before.dtype, ([], []))
            targets += tensors
            for (shape, strides), start, size in zip(self.layouts, self.starts, self.sizes):
                sources.append(flat[start : start + size].as_strided(shape, strides))
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)

    def squared_displacements(self, group: TensorGroup, y: Tensor, e: Tensor) -> Tensor:
        """Return |z - z_1|^2 over the sampled coordinates of each tensor."""
        lists = zip(group.coordinates, group.initial_sample, self._sampled_counts)
        z_1 = torch.cat([sampled.part(whole, n) if n else whole[:0] for sampled, whole, n in lists])
        y, e = y.view(-1)[self._sampled], e.reshape(-1)[self._sampled]
        z = torch.add(y, e, alpha=INTERPOLATION)
        squares = (z - z_1).to(accumulator_dtype(y.device)).square()
        return squares.new_zeros(len(group.params)).index_add_(0, self._sampled_owner, squares)


def _slabs(group: TensorGroup) -> Iterator[tuple[TensorGroup, _Rows]]:
    """Yield parts of the group that are handled together, and their rows."""
    limit = _CPU_SLAB if group.device.type == "cpu" else _SLAB
    sizes, start, size = [p.numel() for p in group.params], 0, 0
    for end in range(1, len(sizes) + 1):
        size += sizes[end - 1]
        if end == len(sizes) or size + sizes[end] > limit:
            part, start, size = group.slice(start, end), end, 0
            layouts = tuple((tuple(p.shape), plain.dense_strides(p)) for p in part.params)
            # Tensors made under a FakeTensorMode or torch.compile must not be used later.
            fake = torch.compiler.is_compiling() or hasattr(group.params[0], "fake_mode")
            make = _Rows if fake else _cached_rows
            yield part, make(layouts, tuple(part.coordinates), group.device)


_cached_rows = lru_cache(maxsize=64)(_Rows)


def _flat(t: Tensor, layout: _Layout) -> Tensor:
    """Return the elements of t in the order of memory of a layout."""
    shape, strides = layout
    if t.is_contiguous() and strides == plain.row_major_strides(shape):
        return t.view(-1)
    if t.stride() != strides:
        t = torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device).copy_(t)
    return t.as_strided((t.numel(),), (1,))


def _repeated(counts: Sequence[int]) -> Tensor:
    """Return 0 as often as the first count says, 1 as often as the second, and so on."""
    numbers, repeats = torch.arange(len(counts), device="cpu"), torch.tensor(counts, device="cpu")
    return numbers.repeat_interleave(repeats, output_size=sum(counts))
