"""From parameter groups to bundles: which tensors take part in a pass, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from stormplus.torch.core.sharding import (
    Groups,
    local,
    local_gradient,
    norm_groups,
    sum_over_processes,
)
from stormplus.torch.core.state import FROZEN, JOINED, State, make_buffer

_requires_grad = attrgetter("requires_grad")
_PLAIN = (Tensor, nn.Parameter)  # neither sharded nor of another kind


class Item(NamedTuple):
    """One parameter in a pass: what lies on this process, complex numbers as pairs of reals."""

    x: Tensor
    g: Tensor | None  # None is a zero gradient
    buffers: tuple[Tensor, ...]  # in the order in which the optimizer names them
    state: State


@dataclass(slots=True)
class Bundle:
    """Parameters of one dtype and device that share every coefficient."""

    group: dict[str, Any]
    bucket: int
    process_groups: Groups  # over which the norms are summed; () if not sharded
    joining: bool  # whether they get their first gradient
    has_grad: bool
    device: torch.device
    dtype: torch.dtype  # of the first buffer
    sign: float  # -1 to maximize
    l2: float  # weight decay as a part of the objective
    decoupled: float  # weight decay beside it
    items: list[Item]


class _Member(NamedTuple):
    p: Tensor
    group: dict[str, Any]
    place: int  # of the group
    bucket: int
    process_groups: Groups


def _kind(member: _Member) -> tuple[torch.device, torch.dtype, torch.Size]:
    return member.p.device, member.p.dtype, member.p.shape


def _local(t: Tensor) -> Tensor:
    """As `sharding.local`; most tensors are whole and real."""
    if type(t) in _PLAIN and not t.is_complex():
        return t.detach() if t.requires_grad else t
    return local(t)


class Roster:
    """The trainable parameters of an optimizer: made anew only when something has changed.

    Attributes:
        params: The parameters.
        devices: Where all parameters are, trainable or not.
        sizes: The number of trainable elements in each bucket.
        process_groups: All that norms are summed over, in the same order on every rank.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        states: dict[Tensor, State],
        scope: str,
        buffers: Mapping[str, bool],
    ) -> None:
        everyone = parameters(groups)
        self._groups = [(group, list(group["params"])) for group in groups]
        self._frozen = [p for p in everyone if not p.requires_grad]
        self._states, self._buffers = states, buffers
        self._members: list[_Member] = []
        self.params = [p for p in everyone if p.requires_grad]
        self.devices = list(dict.fromkeys(p.device for p in everyone))
        buckets = {"global": 1, "group": len(groups), "tensor": len(everyone)}[scope]
        self.sizes = [0] * buckets
        self.process_groups: list[Groups] = []
        places = ((i, p) for i, group in enumerate(groups) for p in group["params"])
        for j, (i, p) in enumerate(places):
            state = states[p]
            if not p.requires_grad:  # never moved, and its buffers are dropped
                for name in buffers:
                    state.pop(name, None)
                state["joined"] = FROZEN
                continue
            bucket = {"global": 0, "group": i, "tensor": j}[scope]
            self.sizes[bucket] += p.numel() * (2 if p.is_complex() else 1)
            shards = norm_groups(p)
            if shards not in self.process_groups:
                self.process_groups.append(shards)
            for name, wide in buffers.items():
                make_buffer(p, state, name, wide=wide)
            self._members.append(_Member(p, groups[i], i, bucket, shards))
        self._where = list(map(_kind, self._members))

    def describes(self, groups: list[dict[str, Any]]) -> bool:
        """Whether these are the same parameters, as they were, and the same of them trainable."""
        return (
            len(groups) == len(self._groups)
            and all(
                group is known
                and len(group["params"]) == len(params)
                and all(map(is_, group["params"], params))
                for group, (known, params) in zip(groups, self._groups)
            )
            and not any(map(_requires_grad, self._frozen))
            and self.holds()
        )

    def holds(self) -> bool:
        """Whether the trainable parameters are so still, and as they were."""
        return (
            all(map(_requires_grad, self.params)) and list(map(_kind, self._members)) == self._where
        )

    def sizes_like(self, numbers: Tensor) -> Tensor:
        """The sizes as a vector like the run's; a bucket whose parameters are gone has size 1."""
        sizes = [max(size, 1) for size in self.sizes]
        sizes += [1] * (len(numbers) - len(sizes))
        return torch.tensor(sizes).to(numbers, non_blocking=True)

    def bundles(self) -> list[Bundle]:
        """Sort the parameters; what cannot be handled is refused before any move."""
        found: dict[Any, Bundle] = {}
        for member in self._members:
            p, g = member.p, member.p.grad
            state = self._states[p]
            joining = state["joined"] != JOINED
            if joining and g is not None and state["joined"] == FROZEN and not bool(g.any()):
                g = None  # zeros left from before it was frozen say nothing
            # Beyond the paper: who has no gradient yet waits, and takes d = g at the first one;
            # from then on a missing gradient is a zero gradient.
            if g is None and joining:
                continue
            if g is not None and g.layout != torch.strided:
                name = name_of([group for group, _ in self._groups], p)
                raise RuntimeError(
                    f"the gradient of {name} is sparse ({g.layout}), which is not supported: make "
                    "it dense, for example with nn.Embedding(..., sparse=False)"
                )
            buffers = tuple([_local(state[name]) for name in self._buffers])
            x = _local(p)
            where = (member.place, member.bucket, member.process_groups, x.device, x.dtype)
            key = (*where, joining, g is None)
            if key not in found:
                group = member.group
                decay, decoupled = float(group["weight_decay"]), group["decoupled_weight_decay"]
                found[key] = Bundle(
                    group=group,
                    bucket=member.bucket,
                    process_groups=member.process_groups,
                    joining=joining,
                    has_grad=g is not None,
                    device=x.device,
                    dtype=buffers[0].dtype,
                    sign=-1.0 if group["maximize"] else 1.0,
                    l2=0.0 if decoupled else decay,
                    decoupled=decay if decoupled else 0.0,
                    items=[],
                )
            if g is not None:
                g = _local(g) if type(p) in _PLAIN else local_gradient(p, g)
            found[key].items.append(Item(x, g, buffers, state))
        return list(found.values())


class Totals:
    """Sums over tensors, a row for each kind and a column for each bucket.

    A kernel adds what a bundle contributes to the bundle's `room`. Parts of sharded parameters
    are summed over their processes; those of replicated ones are the same on every rank.
    """

    def __init__(self, rows: int, roster: Roster, like: Tensor) -> None:
        self._process_groups = roster.process_groups
        self._whole = like.new_zeros(rows, len(like))
        self._parts: dict[tuple[Groups, torch.device], Tensor] = {}

    def room(self, bundle: Bundle) -> Tensor:
        """Where a bundle's numbers are added: one entry a row, on the bundle's device."""
        if not bundle.process_groups and bundle.device == self._whole.device:
            return self._whole[:, bundle.bucket]
        key = bundle.process_groups, bundle.device
        if key not in self._parts:
            self._parts[key] = torch.zeros_like(self._whole, device=bundle.device)
        return self._parts[key][:, bundle.bucket]

    def sum(self) -> Tensor:
        """All of it. Every rank must call this, also one whose shards are empty."""
        if not self._parts and not any(self._process_groups):
            return self._whole
        shares = {groups: torch.zeros_like(self._whole) for groups in self._process_groups}
        for (groups, _), part in self._parts.items():
            shares[groups] = shares[groups] + part.to(self._whole, non_blocking=True)
        return self._whole + sum_over_processes(shares)


def parameters(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in groups))


def name_of(groups: list[dict[str, Any]], p: Tensor) -> str:
    for i, group in enumerate(groups):
        for j, q in enumerate(group["params"]):
            if q is p:
                where = f"parameter {j} of group {i}"
                named = group.get("param_names")
                return f"{where} ('{named[j]}')" if named else f"{where}, shape {tuple(p.shape)}"
    raise KeyError("not a parameter of this optimizer")


def blame(groups: list[dict[str, Any]]) -> str:
    """What is not finite, by name."""
    for p in parameters(groups):
        if p.requires_grad and p.grad is not None:
            g = local(p.grad).to(torch.float64 if p.device.type != "mps" else torch.float32)
            if not bool(torch.isfinite(torch.linalg.vector_norm(g) ** 2)):
                return f"the squared norm of the gradient of {name_of(groups, p)} is not finite"
    return (
        "a squared norm or a sum of them is not finite: of a gradient on another process, of a "
        "parameter under weight decay, or of the estimator"
    )


class FreshGradients:
    """Checks that an evaluation has written a gradient since this was made.

    Trainers that step without a closure may pass an empty one instead: both gradients would
    silently be the same tensor. Weak references, because gradients must be free to go.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        grads: Iterator[tuple[Tensor, Tensor | None]] = ((p, p.grad) for p in params)
        self._seen = [(p, TensorWeakRef(g), g._version) for p, g in grads if g is not None]

    def check(self) -> None:
        if self._seen and all(
            p.grad is not None and p.grad is grad() and p.grad._version == version
            for p, grad, version in self._seen
        ):
            raise RuntimeError(
                "the closure has not computed a gradient: after its second call every p.grad is "
                "the tensor of the first, unwritten. Call backward in it, on the same sample; if "
                "gradients are written behind autograd's back (CUDA graphs), use move() and "
                "estimate(); inside a trainer, stormplus.integrations"
            )
