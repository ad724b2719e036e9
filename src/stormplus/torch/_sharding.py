"""Parameters that are spread over processes: the local shard, and sums over all shards."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from stormplus.untuned_rule import sample_stride

ProcessGroups: TypeAlias = tuple[Any, ...]  # to sum over; () for a replicated tensor


def is_dtensor(t: Tensor) -> bool:
    """Return whether t is a DTensor, without importing it, which takes half a second."""
    if type(t) in (Tensor, nn.Parameter):
        return False
    return hasattr(t, "to_local") and hasattr(t, "placements")


def local(t: Tensor) -> Tensor:
    """Return the local part of t as a plain real tensor without grad."""
    if t.requires_grad:
        t = t.detach()
    if is_dtensor(t):
        t = t.to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def local_tensors(
    p: Tensor, g: Tensor, state: dict[str, Any], names: Sequence[str]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the local parameter, gradient and buffers, contiguous unless there are gaps."""
    if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    x, g = local(p), local(g).resolve_neg()
    order = memory_order(x)
    buffers = {name: local(state[name]) for name in names if name in state}
    for name, buffer in buffers.items():
        if buffer.shape == x.shape:
            buffers[name] = buffer.permute(order)
    return x.permute(order), g.permute(order).contiguous(), buffers


def norm_groups(p: Tensor, *, replicas: bool = False) -> ProcessGroups:
    """Return the process groups over which p's squared norm is to be summed.

    Only sharded dimensions count: over a replicated one every process has the same part. With
    `replicas`, return the groups of those dimensions too.
    """
    if getattr(p, "_fsdp_flattened", False):
        raise RuntimeError(
            "a parameter of FullyShardedDataParallel (FSDP1) is a flat piece that does not say "
            "which processes have the rest: use torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if not is_dtensor(p):
        return ()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise RuntimeError(
            f"a parameter with placements {placements} is only a part of a sum: "
            "redistribute it to Shard or Replicate before making the optimizer"
        )
    # Not `is_shard()`: it is False for the strided shards of FSDP over tensor parallelism.
    return tuple(
        mesh.get_group(i)
        for i, placement in enumerate(placements)
        if (replicas or not placement.is_replicate()) and mesh.size(i) > 1
    )


def memory_order(x: Tensor) -> list[int]:
    """Return the order of dimensions in which x is contiguous, unless it has gaps."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def coordinate_count(p: Tensor) -> int:
    """Return on how many coordinates a tensor's distance is measured."""
    size = _real_size(p)
    return -(-size // sample_stride(size))


@dataclass(eq=False)
class SampledCoordinates:
    """Every k-th coordinate of a tensor in row-major order, of which this process may have a part.

    Attributes:
        size: The number of coordinates of the whole tensor; complex ones count twice.
        count: How many of them are sampled.
        count_here: How many of the sampled ones are here.
        index: Which elements of the local part, in its `memory_order`, are sampled; ascending.
        in_whole: Their places in the whole sample.
        stride: k, if `index` is 0, k, 2k, ... and `in_whole` is 0, 1, 2, ...; else 0.
    """

    size: int
    count: int
    count_here: int
    index: Tensor
    in_whole: Tensor
    stride: int

    @classmethod
    def of(cls, p: Tensor) -> SampledCoordinates:
        size, x = _real_size(p), torch.atleast_1d(local(p))
        shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape) or (1,)
        stride = sample_stride(size)
        sampled = np.arange(0, size, stride)
        here, places = np.full(len(sampled), True), []
        for coordinate, held in zip(np.unravel_index(sampled, shape), _local_ranges(p, shape)):
            here &= (held.start <= coordinate) & (coordinate < held.stop)
            places.append(coordinate - held.start)
        (in_whole,) = here.nonzero()
        steps = torch.empty_like(x, device="meta").stride()  # those of x, but without gaps
        index = np.sum([place[here] * step for place, step in zip(places, steps)], axis=0)
        ascending = index.argsort()
        index_here, places_here = index[ascending], in_whole[ascending]
        uploaded = _index_on_device(index_here, x), _index_on_device(places_here, x)
        every_kth = np.array_equal(index_here, range(0, x.numel(), stride))
        stride = stride if every_kth and _is_range(places_here) else 0
        return cls(size, len(sampled), len(index_here), *uploaded, stride)

    @cached_property
    def packed(self) -> bytes:
        """What native.c calls a `Sample`, packed once: it took 2 % of a step on small tensors."""
        pointers = self.index.data_ptr(), self.in_whole.data_ptr()
        return struct.pack("4q", self.count_here, self.stride, *pointers)

    def store(self, x: Tensor, whole: Tensor, process_groups: ProcessGroups) -> None:
        """Write the sampled coordinates of x into `whole`, complete on every process."""
        whole.zero_().index_copy_(0, self.in_whole, x.reshape(-1)[self.index].to(whole.dtype))
        for group in process_groups:
            torch.distributed.all_reduce(whole, group=group)


def _real_size(p: Tensor) -> int:
    return p.numel() * (2 if p.is_complex() else 1)


def _local_ranges(p: Tensor, shape: tuple[int, ...]) -> list[range]:
    """Return which indices of each dimension of p, whose shape in reals is given, are here."""
    held = [range(size) for size in shape]
    if not is_dtensor(p):
        return held
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    at = mesh.get_coordinate()
    # With FSDP over TP, the `_StridedShard` placement comes first but is split last.
    order = sorted(range(len(placements)), key=lambda i: hasattr(placements[i], "split_factor"))
    for i in order:
        if not placements[i].is_replicate():
            dim = placements[i].dim
            size = -(-len(held[dim]) // mesh.size(i))  # as torch.chunk
            start = len(held[dim]) if at is None else at[i] * size
            held[dim] = held[dim][start : start + size]
    expected, here = tuple(map(len, held)), tuple(local(p).shape)
    if expected != here and 0 not in expected:
        raise RuntimeError(
            f"a parameter with placements {placements} has a local part of shape {here}, where "
            f"{expected} was expected: shard it evenly, or with torch's own placements"
        )
    return held


def _index_on_device(index: np.ndarray, x: Tensor) -> Tensor:
    """Return an index on the device of x. Of a small tensor it is 0, 1, ...: these share one."""
    n = len(index)
    if _is_range(index) and not torch._C._len_torch_dispatch_stack():
        return _first_integers(1 << n.bit_length(), x.device)[:n]
    return torch.from_numpy(index).to(x.device)


def _is_range(index: np.ndarray) -> bool:
    return np.array_equal(index, np.arange(len(index)))


@lru_cache(maxsize=64)
def _first_integers(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


def reshard() -> None:
    """Make FSDP2 drop gathered parameters; call this before parameters are written to.

    Only a backward pass releases a root's parameters: after a validation the next pass would not
    see what is written to the shards. Parameters do not know their modules, so all gather again.
    """
    known = sys.modules.get("torch.distributed._composable_state")
    for module in list(getattr(known, "_module_state_mapping", ())):
        if hasattr(module, "reshard"):
            module.reshard()


def sum_over_processes(
    parts: Sequence[tuple[ProcessGroups, Any]], groups: Sequence[Any], like: Tensor
) -> Tensor:
    """Return the sum of all parts, each added up over its process groups.

    This takes one all-reduce for each of `groups`, which are in the same order on every rank. A
    part that a group does not shard is averaged over it: its processes have the same part.
    """
    shares = []
    for process_groups, numbers in parts:
        part = as_tensor(numbers, like)
        copies = [group.size() for group in groups if group not in process_groups]
        shares.append(part / math.prod(copies) if copies else part)
    # Contiguous: an all-reduce adds in the order of memory, and a transposed part would mix rows.
    total = shares[0].contiguous() if len(shares) == 1 else torch.stack(shares).sum(dim=0)
    for group in groups:
        torch.distributed.all_reduce(total, group=group)
    return total


def as_tensor(numbers: Any, like: Tensor) -> Tensor:
    """Return numbers as a tensor on the device of `like`, without waiting."""
    if isinstance(numbers, Tensor):
        return numbers.to(like, non_blocking=True)
    # Without a dtype, Python floats would become float32.
    return torch.as_tensor(numbers, dtype=like.dtype, device="cpu").to(like, non_blocking=True)
