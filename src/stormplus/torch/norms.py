"""Squared norms that can be trusted: accurate, and global when parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

Groups: TypeAlias = tuple[Any, ...]  # process groups to sum over; () for a replicated tensor
Part: TypeAlias = tuple[int, Groups, Tensor]  # bucket, groups, and a part of a squared norm


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Float64 where the device has it; `rules.Sum` compensates where it has not."""
    return torch.float32 if device.type == "mps" else torch.float64


def blocks(limit: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of at most `limit` elements that walk through tensors of one shape together."""
    first, flat = tensors[0], flat_views(*tensors)
    if flat is None:
        rows = max(1, limit * first.shape[0] // max(first.numel(), 1))
        return zip(*(torch.split(t, rows) for t in tensors))
    if first.numel() <= limit:
        return iter([flat])
    return zip(*(torch.split(t, limit) for t in flat))


def flat_views(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """One-dimensional views in the order of memory, if the tensors are laid out alike."""
    if not all(t.is_contiguous() for t in tensors):
        strides = tensors[0].stride()
        if any(t.stride() != strides for t in tensors):
            return None
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])  # channels_last, say
        tensors = tuple(t.permute(order) for t in tensors)
        if not tensors[0].is_contiguous():
            return None
    return tuple(t.view(-1) for t in tensors)


def scratch_for(tensors: Sequence[Tensor], limit: int) -> Tensor | None:
    """Room for one block in the accumulator's precision, if the tensors have another."""
    wide = accumulator_dtype(tensors[0].device)
    if tensors[0].dtype == wide:
        return None
    size = min(limit, max(t.numel() for t in tensors))
    return torch.empty(size, dtype=wide, device=tensors[0].device)


def square_norm(block: Tensor, scratch: Tensor | None = None) -> Tensor:
    """|block|^2 in the accumulator's precision.

    A float32 sum of squares loses its last digits on large tensors and overflows from
    1e19 on; in float64 every float32 is safe. Fresh memory for the wide copy of each block
    would cost more than the norm: `scratch` is used again and again.
    """
    flat = block.reshape(-1)
    if scratch is not None and flat.numel() <= scratch.numel():
        wide = scratch[: flat.numel()].copy_(flat)
    else:
        wide = flat.to(accumulator_dtype(block.device))
    return torch.dot(wide, wide)


def collect(
    rows: Sequence[Sequence[Part]], process_groups: Sequence[Groups], like: Tensor
) -> Tensor:
    """Add up the parts: a row for each list, a column for each bucket, as `like` has.

    Parts of sharded parameters are summed over their process groups, with one all-reduce
    for each group whatever the number of rows, buckets and parameters; those of replicated
    parameters are the same on every rank and are not.

    Args:
        rows: The parts of |g|^2, say, and those of |d|^2.
        process_groups: All that occur on any rank, in the same order on every rank, for a
            rank whose shard is empty has no part but must take its turn.
        like: A vector with one entry a bucket.
    """
    shares: dict[Groups, Tensor] = {}
    for groups in process_groups:
        parts = [[(b, part) for b, key, part in row if key == groups] for row in rows]
        shares[groups] = torch.stack([_per_bucket(row, like) for row in parts])
    for group in dict.fromkeys(chain.from_iterable(process_groups)):
        members = [groups for groups in shares if group in groups]
        joined = torch.stack([shares[groups] for groups in members])
        torch.distributed.all_reduce(joined, group=group)
        shares.update(zip(members, joined))
    total = like.new_zeros(len(rows), len(like))
    for share in shares.values():
        total = total + share
    return total


def _per_bucket(parts: list[tuple[int, Tensor]], like: Tensor) -> Tensor:
    if not parts:
        return torch.zeros_like(like)
    values = torch.stack([part.to(like.device, like.dtype, non_blocking=True) for _, part in parts])
    if len(like) == 1:
        return values.sum().reshape(1)
    index = torch.tensor([bucket for bucket, _ in parts]).to(like.device, non_blocking=True)
    return torch.zeros_like(like).index_add_(0, index, values)
