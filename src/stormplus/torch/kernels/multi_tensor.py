"""The passes on lists of tensors, in pure torch; the number of launches does not depend on them.

The portable backend: it runs on any device that torch has, never waits for it, and can be traced by
torch.compile. Tensors are copied into one padded matrix, in which every tensor has rows of its own;
the arithmetic is that of plain.py, with a column of coefficients; then the results are copied back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stormplus.torch._sharding import SampledCoordinates
from stormplus.torch._tensors import Number, Numbers, TensorGroup
from stormplus.torch.kernels import plain
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus.untuned_rule import INTERPOLATION

_WIDTH = 1024  # elements in a row of the matrix
# Elements that are copied at a time, unless one tensor has more: fewer would mean more launches.
_SLAB = 1 << 25


def any_nonfinite(group: TensorGroup) -> Any:
    """See plain.py."""
    norms = torch._foreach_norm(group.grads, math.inf)
    return ~(torch.stack(norms) < math.inf).all()  # NaN compares False


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """See plain.py."""
    for here, rows in _slabs(group):
        lists = group.params[here], group.estimators[here]
        x, d, g = rows.gather(*lists, group.grads[here])
        g_tilde = plain.objective_gradient(x.to(d.dtype), g, group.sign, group.l2)
        rows.scatter(lists, (x, d), plain.moved_x_and_d(x, g_tilde, d, alpha), skip)


def estimate(
    group: TensorGroup, one_minus_a: Number, *, finite_only: bool, skip: Any = None
) -> Numbers:
    """See plain.py."""
    norms = []
    for here, rows in _slabs(group):
        estimators = group.estimators[here]
        x, d, g = rows.gather(group.params[here], estimators, group.grads[here])
        gradient = plain.objective_gradient(x.to(d.dtype), g, group.sign, group.l2)
        new = plain.estimated(gradient, d, one_minus_a, finite_only=finite_only)
        rows.scatter([estimators], [d], [new], skip)
        norms.append(torch.stack([plain.squared_norm(gradient), plain.squared_norm(new)]))
    return reduce(torch.add, norms)


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> Numbers:
    """See plain.py."""
    sums, table = plain.new_sums(group, 2, len(group.params)), torch.stack(coefficients)
    for here, rows in _slabs(group):
        lists = [group.params[here], group.z_minus_x[here], group.grad_rms[here]]
        if group.masters:
            lists.append(group.masters[here])
        g, *old = rows.gather(group.grads[here], *lists)
        x, old_e, old_s, *master = old
        y = plain.full_precision(x, *master)
        row_coefficients = table[:, here][:, rows.owner].unsqueeze(-1)
        wide_coefficients = UntunedCoefficients(*row_coefficients.to(y.dtype).unbind())
        y, e, s, u = plain.untuned_update(y, g, old_e, old_s, wide_coefficients)
        if e.dtype != old_e.dtype:
            place = rows.places.unsqueeze(-1) + torch.arange(_WIDTH, device=group.device)
            step = UntunedCoefficients(*row_coefficients).step
            e, s = plain.stochastic_round(torch.stack([e, s]), step, place)
        new_x = y.to(x.dtype)
        rows.scatter(lists, old, (new_x, e, s, y), skip)
        if master:
            y = y + 0 * new_x  # make y non-finite where the half-precision x overflowed
        sums[0, here].index_add_(0, rows.owner, u.square().sum(1, dtype=sums.dtype))
        z_1 = torch.cat(group.initial_sample[here])[rows.in_whole]
        y, e = y.view(-1)[rows.sampled], e.reshape(-1)[rows.sampled]
        z = torch.add(y, e, alpha=INTERPOLATION)
        squares = (z - z_1).to(sums.dtype).square()
        sums[1, here].index_add_(0, rows.sampled_owner, squares)
    return sums


class _Rows:
    """Which rows of the matrix belong to which tensor.

    Attributes:
        owner: The tensor of each row.
        places: The place in its tensor of the first element of each row.
        sampled: The places of all sampled coordinates in the matrix.
        in_whole: Their places in the samples of all tensors.
        sampled_owner: Their tensors.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        coordinates: tuple[SampledCoordinates, ...],
        device: torch.device,
    ) -> None:
        counts = [-(-size // _WIDTH) for size in sizes]
        self.sizes, self.device = sizes, device
        self.starts = [_WIDTH * start for start in accumulate(counts, initial=0)]
        self._padding: dict[torch.dtype, Tensor] = {}
        self.owner = _repeated(counts, device)
        starts = torch.tensor(self.starts, device="cpu").to(device)
        self.places = _WIDTH * torch.arange(len(self.owner), device=device) - starts[self.owner]
        if coordinates:
            samples = accumulate((s.count for s in coordinates), initial=0)
            lists = list(zip(self.starts, samples, coordinates))
            self.sampled = torch.cat([start + s.index for start, _, s in lists])
            self.in_whole = torch.cat([start + s.in_whole for _, start, s in lists])
            self.sampled_owner = _repeated([s.count_here for s in coordinates], device)

    def gather(self, *lists: Sequence[Tensor]) -> list[Tensor]:
        """Return the matrices of some lists of tensors, padded with zeros; one copy per dtype."""
        pieces: dict[torch.dtype, list[Tensor]] = {}
        for tensors in lists:
            dtype = tensors[0].dtype
            if dtype not in self._padding:
                self._padding[dtype] = torch.zeros(_WIDTH, dtype=dtype, device=self.device)
            for t, size in zip(tensors, self.sizes):
                padding = self._padding[dtype][: -size % _WIDTH]
                pieces.setdefault(dtype, []).extend([t.reshape(-1), padding])
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
            for t, start, size in zip(tensors, self.starts, self.sizes):
                sources.append(flat[start : start + size].view(t.shape))
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)


def _slabs(group: TensorGroup) -> Iterator[tuple[slice, _Rows]]:
    """Yield which tensors are handled together, and their rows."""
    sizes, start, size = [p.numel() for p in group.params], 0, 0
    for end in range(1, len(sizes) + 1):
        size += sizes[end - 1]
        if end == len(sizes) or size + sizes[end] > _SLAB:
            here, start, size = slice(start, end), end, 0
            # Tensors made under torch.compile must not be used later.
            make = _Rows if torch.compiler.is_compiling() else _cached_rows
            yield here, make(tuple(sizes[here]), tuple(group.coordinates[here]), group.device)


_cached_rows = lru_cache(maxsize=64)(_Rows)


def _repeated(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return 0 as often as the first count says, 1 as often as the second, and so on."""
    repeats = torch.tensor(counts, device="cpu")
    return torch.repeat_interleave(repeats, output_size=sum(counts)).to(device)
