"""Squared norms that can be trusted: accurate, and global when parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    first = tensors[0]
    if all(t.is_contiguous() for t in tensors):
        flat = [t.view(-1) for t in tensors]
        return (
            zip(*(torch.split(t, limit) for t in flat))
            if first.numel() > limit
            else iter([(*flat,)])
        )
    rows = max(1, limit * first.shape[0] // max(first.numel(), 1))
    return zip(*(torch.split(t, rows) for t in tensors))


def square_norm(block: Tensor) -> Tensor:
    """|block|^2, exact to rounding for every float32 from 1e-38 to 1e38.

    A float32 sum of squares loses its last digits on large tensors and overflows from
    1e19 on, so the squares are summed in the accumulator's precision.
    """
    wide = block.to(accumulator_dtype(block.device))
    flat = wide.reshape(-1)
    return torch.dot(flat, flat)


def collect(
    rows: Sequence[Sequence[Part]], process_groups: Sequence[Groups], like: Tensor
) -> Tensor:
    """Add up the parts: a row for each list, a column for each bucket, as `like` has.

    Parts of sharded parameters are summed over their process groups, all rows in one
    all-reduce; those of replicated parameters are the same on every rank and are not.

    Args:
        rows: The parts of |g|^2, say, and those of |d|^2.
        process_groups: All that occur on any rank, in the same order on every rank, for a
            rank whose shard is empty has no part but must take its turn.
        like: A vector with one entry a bucket.
    """
    total = like.new_zeros(len(rows), len(like))
    for groups in process_groups:
        shares = [[(b, part) for b, key, part in row if key == groups] for row in rows]
        share = torch.stack([_per_bucket(parts, like) for parts in shares])
        for group in groups:
            torch.distributed.all_reduce(share, group=group)
        total = total + share
    return total


def _per_bucket(parts: list[tuple[int, Tensor]], like: Tensor) -> Tensor:
    if not parts:
        return torch.zeros_like(like)
    values = torch.stack([part.to(like.device, like.dtype, non_blocking=True) for _, part in parts])
    if len(like) == 1:
        return values.sum().reshape(1)
    index = torch.tensor([bucket for bucket, _ in parts], device=like.device)
    return torch.zeros_like(like).index_add_(0, index, values)
