"""Parameters that are spread over processes: the part that lies here, and who has the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Groups: TypeAlias = tuple[Any, ...]  # process groups to sum over; () for a replicated tensor

# Wrappers that construct an optimizer on a part of the parameters, by their modules.
_SPLITTERS = {
    "torch.distributed.optim.zero_redundancy_optimizer": "ZeroRedundancyOptimizer",
    "torch.distributed.optim.optimizer": "DistributedOptimizer",
    "torch.distributed.optim.apply_optimizer_in_backward": "_apply_optimizer_in_backward",
}


def is_dtensor(t: Tensor) -> bool:
    # By its methods: importing torch.distributed.tensor costs every user half a second.
    if type(t) in (Tensor, nn.Parameter):
        return False
    return hasattr(t, "to_local") and hasattr(t, "placements")


def local(t: Tensor) -> Tensor:
    """The part of t that lies on this process, as a plain real tensor without grad."""
    if t.requires_grad:
        t = t.detach()
    if is_dtensor(t):
        t = t.to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def local_gradient(p: Tensor, g: Tensor) -> Tensor:
    """As `local`, laid out as p is."""
    if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(g)


def norm_groups(p: Tensor) -> Groups:
    """The process groups over which p's squared norm is to be summed.

    Only sharded dimensions count: over a replicated one every process has the same part.
    """
    if getattr(p, "_fsdp_flattened", False):
        raise RuntimeError(
            "a parameter of FullyShardedDataParallel (FSDP1) is a flat piece that does not say "
            "who has the rest: use torch.distributed.fsdp.fully_shard (FSDP2) instead"
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
    """Which indices of each dimension of p lie on this process."""
    held = [torch.arange(size) for size in p.shape]
    if not is_dtensor(p):
        return held
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    at = mesh.get_coordinate()
    # FSDP over tensor parallelism cuts last what its strided shard names first.
    order = sorted(range(len(placements)), key=lambda i: hasattr(placements[i], "split_factor"))
    for i in order:
        if not placements[i].is_replicate():
            dim = placements[i].dim
            parts = torch.chunk(held[dim], mesh.size(i))
            held[dim] = parts[at[i]] if at is not None and at[i] < len(parts) else held[dim][:0]
    found, here = tuple(map(len, held)), tuple(p.to_local().shape)  # type: ignore[attr-defined]
    if found != here and 0 not in found:
        raise RuntimeError(
            f"a parameter with placements {placements} has a part of shape {here} here, where "
            f"{found} was expected: shard it evenly, or with torch's own placements"
        )
    return held


def reshard() -> None:
    """Let FSDP2 give up what it has gathered; call it before parameters are written to.

    Only a backward pass lets go of a root's parameters. After a forward pass without one, as in
    a validation, the next would not see what is written to the shards. Parameters do not know
    their modules, so all modules of the process gather theirs again.
    """
    known = sys.modules.get("torch.distributed._composable_state")
    for module in list(getattr(known, "_module_state_mapping", ())):
        if hasattr(module, "reshard"):
            module.reshard()


def sum_over_processes(shares: dict[Groups, Tensor]) -> Tensor:
    """The sum of all shares, each added up over its process groups.

    One all-reduce for each group, whatever the number of rows, buckets and parameters.

    Args:
        shares: By process groups, in the same order on every rank: a rank whose shard is empty
            has zeros, and must take its turn.
    """
    for group in dict.fromkeys(chain.from_iterable(shares)):
        members = [groups for groups in shares if group in groups]
        joined = torch.stack([shares[groups] for groups in members])
        torch.distributed.all_reduce(joined, group=group)
        shares |= dict(zip(members, joined))
    return torch.stack(list(shares.values())).sum(dim=0)


def check_whole(params: Iterable[Tensor]) -> None:
    """Refuse parameters that are a part of a model, where that can be seen.

    The rules need |g|^2 over all parameters, and the second evaluation needs all of them
    moved.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # nothing but the caller tells a part from a whole
        wrapper = _SPLITTERS.get(frame.f_globals.get("__name__", ""))
        if wrapper is not None:
            raise RuntimeError(
                f"{wrapper} hands the optimizer a part of the parameters, so that the norms "
                "would be wrong and the second evaluation would see parameters that have not "
                "moved: use torch.distributed.fsdp.fully_shard, which divides the optimizer's "
                "state too"
            )
        frame = frame.f_back
    for p in params:
        norm_groups(p)
