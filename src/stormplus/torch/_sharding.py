"""Parameters that are spread over processes: the local shard, and sums over all shards."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

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


def local_gradient(p: Tensor, g: Tensor) -> Tensor:
    """Return the local part of p's gradient, sharded as p is."""
    if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(g).resolve_neg()


def norm_groups(p: Tensor) -> ProcessGroups:
    """Return the process groups over which p's squared norm is to be summed.

    Only sharded dimensions count: over a replicated one every process has the same part.
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
        if not placement.is_replicate() and mesh.size(i) > 1
    )


def held_indices(p: Tensor) -> list[Tensor]:
    """Return which indices of each dimension of p this process has."""
    held = [torch.arange(size) for size in p.shape]
    if not is_dtensor(p):
        return held
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    at = mesh.get_coordinate()
    # With FSDP over TP, the `_StridedShard` placement comes first but is split last.
    order = sorted(range(len(placements)), key=lambda i: hasattr(placements[i], "split_factor"))
    for i in order:
        if not placements[i].is_replicate():
            dim = placements[i].dim
            parts = torch.chunk(held[dim], mesh.size(i))
            held[dim] = parts[at[i]] if at is not None and at[i] < len(parts) else held[dim][:0]
    expected, here = tuple(map(len, held)), tuple(p.to_local().shape)  # type: ignore[attr-defined]
    if expected != here and 0 not in expected:
        raise RuntimeError(
            f"a parameter with placements {placements} has a local part of shape {here}, where "
            f"{expected} was expected: shard it evenly, or with torch's own placements"
        )
    return held


def _real_size(p: Tensor) -> int:
    return p.numel() * (2 if p.is_complex() else 1)


def coordinate_count(p: Tensor) -> int:
    """Return on how many coordinates a tensor's distance is measured."""
    size = _real_size(p)
    return -(-size // sample_stride(size))


class SampledCoordinates:
    """Every k-th coordinate of a tensor in row-major order, of which this process may have a part.

    Attributes:
        size: The number of coordinates of the whole tensor; complex ones count twice.
        count: How many of them are sampled.
        stride: k if the local part is a range of rows of the whole tensor, else 0.
        offset: Where in the whole tensor that range begins.
    """

    def __init__(self, p: Tensor) -> None:
        self.size, self.count = _real_size(p), coordinate_count(p)
        self.stride, self.offset = sample_stride(self.size), 0
        self._in_memory: dict[Any, Tensor] = {}
        if not is_dtensor(p):
            return
        shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
        held = [*held_indices(p), torch.arange(2)] if p.is_complex() else held_indices(p)
        rows, whole_rows = held[0], [torch.arange(size) for size in shape[1:]]
        in_order = len(rows) > 0 and int(rows[-1] - rows[0]) == len(rows) - 1
        if in_order and all(map(torch.equal, held[1:], whole_rows)):
            self.offset = int(rows[0]) * (self.size // shape[0])
            return
        places = torch.arange(0, self.size, self.stride)
        self.stride = 0
        mine, index = torch.ones_like(places, dtype=torch.bool), []
        for coordinate, here, size in zip(torch.unravel_index(places, shape), held, shape):
            at = torch.full((size,), -1).index_copy_(0, here, torch.arange(len(here)))
            index.append(at[coordinate])
            mine &= index[-1] >= 0
        device = local(p).device
        self._in_whole = mine.nonzero().reshape(-1).to(device)
        self._in_part = tuple(i[mine].to(device) for i in index)

    def places(self, shape: tuple[int, ...], memory: tuple[int, ...]) -> Tensor:
        """Return where in the memory of a dense local tensor the sampled coordinates are."""
        if torch.compiler.is_compiling() or (shape, memory) not in self._in_memory:
            first = -self.offset % self.stride
            at = torch.arange(first, math.prod(shape), self.stride, device="cpu")
            coordinates = torch.unravel_index(at, shape) if shape else ()
            at = sum((i * step for i, step in zip(coordinates, memory)), torch.zeros_like(at))
            if torch.compiler.is_compiling():
                return at
            self._in_memory[shape, memory] = at
        return self._in_memory[shape, memory]

    def of(self, t: Tensor) -> Tensor:
        """Return the sampled coordinates of a local tensor."""
        if not self.stride:
            return t[self._in_part]
        if t.is_contiguous() or not is_dense(t):
            return t.reshape(-1)[-self.offset % self.stride :: self.stride]
        places = self.places(tuple(t.shape), t.stride())
        return t.as_strided((t.numel(),), (1,))[places.to(t.device)]

    def part(self, whole: Tensor, count: int) -> Tensor:
        """Return the entries of a whole sample that belong to the `count` local coordinates."""
        if not self.stride:
            return whole[self._in_whole]
        start = -(-self.offset // self.stride)
        return whole[start : start + count]

    def store(self, x: Tensor, whole: Tensor, process_groups: ProcessGroups) -> None:
        """Write the sampled coordinates of x into `whole`, complete on every process."""
        here = self.of(x).to(whole.dtype)
        if torch.compiler.is_compiling():
            # Inductor copies what it takes for an input at the end, when x has moved (torch 2.13).
            here = torch.where(here == here, here, 0)  # noqa: PLR0124
        whole.zero_()
        if self.stride:
            self.part(whole, len(here)).copy_(here)
        else:
            whole[self._in_whole] = here
        for group in process_groups:
            torch.distributed.all_reduce(whole, group=group)


def is_dense(t: Tensor) -> bool:
    """Return whether the elements of t fill a range of memory."""
    return sum((n - 1) * step for n, step in zip(t.shape, t.stride())) + 1 == t.numel()


def reshard() -> None:
    """Make FSDP2 drop gathered parameters; call this before parameters are written to.

    Only a backward pass releases a root's parameters: after a validation the next pass would not
    see what is written to the shards. Parameters do not know their modules, so all gather again.
    """
    known = sys.modules.get("torch.distributed._composable_state")
    for module in list(getattr(known, "_module_state_mapping", ())):
        if hasattr(module, "reshard"):
            module.reshard()


def mesh_groups(p: Tensor) -> ProcessGroups:
    """Return the process groups of all dimensions of a DTensor's mesh."""
    if not is_dtensor(p):
        return ()
    mesh = p.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1)


def sum_over_processes(
    parts: Sequence[tuple[ProcessGroups, Any]], groups: Sequence[Any], like: Tensor
) -> Tensor:
    """Return the sum of all parts, each added up over its process groups.

    This takes one all-reduce for each of `groups`, which are in the same order on every rank. A
    part that a group does not shard is averaged over it: its processes have the same part.
    """
    shares = []
    for process_groups, numbers in parts:
        part = _as_tensor(numbers, like)
        copies = [group.size() for group in groups if group not in process_groups]
        shares.append(part / math.prod(copies) if copies else part)
    # Contiguous: an all-reduce adds in the order of memory, and a transposed part would mix rows.
    total = shares[0].contiguous() if len(shares) == 1 else torch.stack(shares).sum(dim=0)
    for group in groups:
        torch.distributed.all_reduce(total, group=group)
    return total


def _as_tensor(numbers: Any, like: Tensor) -> Tensor:
    if isinstance(numbers, tuple):
        return torch.stack([_as_tensor(number, like) for number in numbers])
    if isinstance(numbers, Tensor):
        return numbers.to(like, non_blocking=True)
    # Without a dtype, Python floats would become float32.
    return torch.as_tensor(numbers, dtype=like.dtype, device="cpu").to(like, non_blocking=True)
