"""Parameters that are spread over processes: the part that lies here, and who has the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(t: Tensor) -> bool:
    # By its methods: importing torch.distributed.tensor costs every user half a second.
    return type(t) is not Tensor and hasattr(t, "to_local") and hasattr(t, "placements")


def local(t: Tensor) -> Tensor:
    """The part of t that lies on this process, as a plain real tensor without grad."""
    t = t.detach()
    if is_dtensor(t):
        t = t.to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def local_gradient(p: Tensor, g: Tensor) -> Tensor:
    """As `local`, laid out as p is."""
    if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(g)


def norm_groups(p: Tensor) -> tuple[Any, ...]:
    """The process groups over which p's squared norm is to be summed.

    Only sharded dimensions count: over a replicated one every process has the same part.
    """
    if not is_dtensor(p):
        return ()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise RuntimeError(
            f"a parameter with placements {placements} is only a part of a sum: "
            "redistribute it to Shard or Replicate before making the optimizer"
        )
    return tuple(
        mesh.get_group(i) for i, placement in enumerate(placements) if placement.is_shard()
    )
