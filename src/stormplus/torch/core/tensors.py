"""From parameter groups to bundles: which tensors take part in a pass, and how."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
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
from stormplus.torch.core.state import FROZEN, JOINED, Buffers, Numbers, State

_requires_grad, _grad, _layout, _dtype = map(
    attrgetter, ("requires_grad", "grad", "layout", "dtype")
)
_kind = attrgetter("device", "dtype", "shape")
_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr
_PLAIN = (Tensor, nn.Parameter)  # neither sharded nor of another kind
_INSIDE = ("stormplus", "torch")


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
    items: list[Item]
    lists: dict[str, Any]  # what a kernel remembers of the tensors as long as they stay in place

    def with_items(self, items: list[Item]) -> Bundle:
        """The same with other tensors, or with new gradients of these."""
        return Bundle(
            *(self.group, self.bucket, self.process_groups, self.joining, self.has_grad),
            *(self.device, self.dtype, items, self.lists),
        )


class Member(NamedTuple):
    """A trainable parameter, and where it belongs."""

    p: Tensor
    group: dict[str, Any]
    place: int  # of the group
    bucket: int
    process_groups: Groups


def _local(t: Tensor) -> Tensor:
    """As `sharding.local`; most tensors are whole and real."""
    if type(t) in _PLAIN and not t.is_complex():
        return t.detach() if t.requires_grad else t
    return local(t)


class Kept:
    """Parameters that are as they were in the step before, but for their gradients.

    To look whether they are costs less than to sort them anew. Only the parameters are held, no
    buffer and no gradient, so that whoever moves these elsewhere gets their memory back.

    Args:
        params: The parameters.
        items: As a pass has seen them.
        states: Of all parameters.
        names: Of their buffers.
    """

    def __init__(
        self,
        params: list[Tensor],
        items: list[Item],
        states: dict[Tensor, State],
        names: Iterable[str],
    ) -> None:
        counts = [len(item.buffers) for item in items]
        names = tuple(names)
        self._params, self._states = params, states
        self._names = [name for count in counts for name in names[:count]]
        self._owners = [i for i, count in enumerate(counts) for _ in range(count)]
        self._counts = counts
        self._dtypes = [item.x.dtype for item in items]
        self._sizes = [item.x.numel() for item in items]
        self._strides = [item.x.stride() for item in items]
        # The stride of a dimension of size 1 says nothing, and gradients have any there.
        self._contiguous = all(item.x.is_contiguous() for item in items)
        buffers = [b for item in items for b in item.buffers]
        self._buffers = [(b.dtype, b.stride()) for b in buffers]
        self._places = list(map(_data_ptr, [*params, *buffers]))

    @staticmethod
    def fits(params: list[Tensor], items: list[Item]) -> bool:
        """Whether they can be kept: each has a place, and a gradient that is laid out as it is."""
        return all(
            type(p) in _PLAIN
            and not p.is_complex()
            and p.device.type in ("cpu", "cuda")
            and g is not None
            and g.dtype == x.dtype
            and (g.stride() == x.stride() or (g.is_contiguous() and x.is_contiguous()))
            for p, (x, g, _, _) in zip(params, items)
        )

    def renewed(self) -> list[Item] | None:
        """The items with the gradients of now; None if anything else has changed."""
        params = self._params
        gs = list(map(_grad, params))
        entries = list(map(self._states.__getitem__, params))
        owners = map(entries.__getitem__, self._owners)
        buffers: list[Any] = list(map(dict.get, owners, self._names))
        # Few loops of Python's own: this is done in every pass, for every tensor.
        if (
            {*map(type, gs)} != {Tensor}
            or not {*map(type, buffers)} <= {Tensor}
            or {*map(_layout, gs)} != {torch.strided}
            or list(map(_dtype, gs)) != self._dtypes
            or list(map(Tensor.numel, gs)) != self._sizes
            or not self._laid_out_as_before(gs)
            or list(zip(map(_dtype, buffers), map(Tensor.stride, buffers))) != self._buffers
            # The same tensor may lie elsewhere: after `share_memory_()`, say.
            or list(map(_data_ptr, [*params, *buffers])) != self._places
            or any(map(Tensor.is_neg, gs))
            or torch._C._len_torch_dispatch_stack()  # somebody looks on
        ):
            return None
        if any(map(_requires_grad, gs)):
            gs = [g.detach() for g in gs]
        if len(buffers) == len(params):
            of_each: Iterable[tuple[Tensor, ...]] = zip(buffers)
        else:
            each = iter(buffers)
            of_each = [tuple(islice(each, count)) for count in self._counts]
        return list(map(Item, params, gs, of_each, entries))

    def _laid_out_as_before(self, gs: list[Tensor]) -> bool:
        if self._contiguous and all(map(Tensor.is_contiguous, gs)):
            return True
        return list(map(Tensor.stride, gs)) == self._strides


class Roster:
    """The trainable parameters of an optimizer: made anew only when something has changed.

    Attributes:
        members: The parameters, and where they belong.
        params: The parameters alone.
        devices: Where all parameters are, trainable or not.
        sizes: The number of trainable elements in each bucket.
        process_groups: All that norms are summed over, in the same order on every rank.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        states: dict[Tensor, State],
        scope: str,
        buffers: Buffers,
    ) -> None:
        everyone = parameters(groups)
        self._groups = [(group, list(group["params"])) for group in groups]
        self._frozen = [p for p in everyone if not p.requires_grad]
        # Frozen, but with buffers until a step is taken without them: one half of a GAN goes on.
        self._leaving: list[Tensor] = []
        self._count = len(states)
        self._states, self._buffers = states, buffers
        self.members: list[Member] = []
        self.params = [p for p in everyone if p.requires_grad]
        self.devices = list(dict.fromkeys(p.device for p in everyone))
        buckets = {"global": 1, "group": len(groups), "tensor": len(everyone)}[scope]
        self.sizes = [0] * buckets
        self.process_groups: list[Groups] = []
        places = ((i, p) for i, group in enumerate(groups) for p in group["params"])
        for j, (i, p) in enumerate(places):
            if not p.requires_grad:
                if states[p].get("joined") == JOINED:
                    self._leaving.append(p)
                else:
                    self._drop(p)
                continue
            bucket = {"global": 0, "group": i, "tensor": j}[scope]
            self.sizes[bucket] += p.numel() * (2 if p.is_complex() else 1)
            shards = norm_groups(p)
            if shards not in self.process_groups:
                self.process_groups.append(shards)
            for name, buffer in buffers.items():
                buffer.place(p, states[p], name)
            self.members.append(Member(p, groups[i], i, bucket, shards))
        self._where = self._kinds()
        self._kept: list[tuple[Bundle, Kept]] = []

    def describes(self, groups: list[dict[str, Any]], states: dict[Tensor, State]) -> bool:
        """Whether these are the same parameters, as they were, and the same of them trainable."""
        return (
            len(groups) == len(self._groups)
            and states is self._states
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
        """Whether the trainable parameters are so still, and as they were, and so is the state."""
        return (
            all(map(_requires_grad, self.params))
            and len(self._states) == self._count
            and all(self._states.values())  # none is empty
            and self._kinds() == self._where
        )

    def _drop(self, p: Tensor) -> None:
        for name in self._buffers:
            self._states[p].pop(name, None)
        self._states[p]["joined"] = FROZEN

    def _kinds(self) -> tuple[list[Any], list[Any]]:
        return list(map(_kind, self.params)), list(map(Tensor.stride, self.params))

    def sizes_like(self, numbers: Tensor | Numbers) -> Tensor | Numbers:
        """The sizes as a vector like the run's; a bucket without a parameter has size 1."""
        sizes = [max(size, 1) for size in self.sizes]
        if isinstance(numbers, Tensor):
            return torch.tensor(sizes).to(numbers, non_blocking=True)
        return np.array(sizes, dtype=np.float64)

    def present(self) -> Iterator[tuple[Member, Tensor | None, bool]]:
        """Who takes part: a parameter, its gradient, and whether it is the first one.

        Who has had no gradient so far waits, and who is frozen leaves. What cannot be handled is
        refused.
        """
        while self._leaving:
            self._drop(self._leaving.pop())
        for member in self.members:
            p, g = member.p, member.p.grad
            joined = self._states[p]["joined"]
            if joined == FROZEN and g is not None and not bool(g.any()):
                g = None  # zeros left from before it was frozen say nothing
            if g is None and joined != JOINED:
                continue
            if g is not None and g.shape != p.shape:
                raise RuntimeError(
                    f"the gradient of {self._name_of(p)} has the shape {tuple(g.shape)}: it is of "
                    "a parameter that was resized since; call opt.zero_grad() before the backward "
                    "pass"
                )
            if g is not None and g.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of {self._name_of(p)} is sparse ({g.layout}), which is not "
                    "supported: make it dense, for example with nn.Embedding(..., sparse=False)"
                )
            if g is not None:
                g = _local(g) if type(p) in _PLAIN else local_gradient(p, g)
                if g.is_neg():  # the native passes see memory, not what torch makes of it
                    g = g.resolve_neg()
            yield member, g, joined != JOINED

    def _name_of(self, p: Tensor) -> str:
        return name_of([group for group, _ in self._groups], p)

    def item(self, member: Member, g: Tensor | None) -> Item:
        """A parameter as a pass sees it."""
        state = self._states[member.p]
        buffers = tuple([_local(state[name]) for name in self._buffers if name in state])
        return Item(_local(member.p), g, buffers, state)

    def bundles(self) -> list[Bundle]:
        """Sort the parameters by what they share."""
        if self._kept and (again := self._same_bundles()):
            return again
        found: dict[Any, Bundle] = {}
        params: dict[Any, list[Tensor]] = {}
        for member, g, joining in self.present():
            # Beyond the paper: who has no gradient yet waits, and takes d = g at the first one;
            # from then on a missing gradient is a zero gradient.
            item = self.item(member, g)
            key = (
                *(member.place, member.bucket, member.process_groups, joining, g is None),
                *(item.x.device, item.x.dtype),
            )
            if key not in found:
                found[key] = Bundle(
                    group=member.group,
                    bucket=member.bucket,
                    process_groups=member.process_groups,
                    joining=joining,
                    has_grad=g is not None,
                    device=item.x.device,
                    dtype=item.buffers[0].dtype,
                    items=[],
                    lists={},
                )
                params[key] = []
            found[key].items.append(item)
            params[key].append(member.p)
        bundles = list(found.values())
        self._kept = []
        if sum(map(len, params.values())) == len(self.members) and not any(
            bundle.joining or not Kept.fits(params[key], bundle.items)
            for key, bundle in found.items()
        ):
            self._kept = [
                (bundle.with_items([]), self.kept(params[key], bundle.items))
                for key, bundle in found.items()
            ]
        return bundles

    def kept(self, params: list[Tensor], items: list[Item]) -> Kept:
        """Members, to be looked at again in the next step."""
        return Kept(params, items, self._states, self._buffers)

    def _same_bundles(self) -> list[Bundle] | None:
        """Those of the last pass with new gradients, if nothing else has changed."""
        found = []
        for bundle, kept in self._kept:
            items = kept.renewed()
            if items is None:
                return None
            found.append(bundle.with_items(items))
        return found


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
        return self.table(bundle.process_groups, bundle.device)[:, bundle.bucket]

    def table(self, process_groups: Groups, device: torch.device) -> Tensor:
        """Where the numbers of tensors on a device are added that these processes share."""
        if not process_groups and device == self._whole.device:
            return self._whole
        key = process_groups, device
        if key not in self._parts:
            self._parts[key] = torch.zeros_like(self._whole, device=device)
        return self._parts[key]

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
                if named and len(named) == len(group["params"]):  # else it was changed by hand
                    return f"{where} ('{named[j]}')"
                return f"{where}, shape {tuple(p.shape)}"
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


def users_level() -> int:
    """The `stacklevel` of a warning that is to show a line of the user's, and none of torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    return level


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


def evaluate_and_look(evaluate: Callable[[], Any], params: Iterable[Tensor]) -> bool:
    """Evaluate again; warn if the gradients were added to those of the evaluation before.

    One small parameter tells, by what autograd hands to it: several backward passes in a closure
    that zeroes first are no mistake. It needs a gradient other than zero to tell by.

    Returns:
        Whether that was seen, or never will be; if not, look at the next pair too.
    """
    known = [p for p in params if p.grad is not None and p.grad.numel() and type(p) in _PLAIN]
    known = sorted((p for p in known if not p.is_meta), key=Tensor.numel)
    p = next((p for p in known if p.grad is not None and bool(p.grad.any())), None)
    if p is None or p.grad is None:
        evaluate()
        return not known
    before, value = p.grad, p.grad.detach().clone()
    parts: list[Tensor] = []
    hook = p.register_hook(lambda g: parts.append(g.detach().clone()))
    try:
        evaluate()
    finally:
        hook.remove()
    if p.grad is not before or not parts:  # a new tensor, or not written by autograd
        return True
    own = torch.stack(parts).sum(0)
    size, rest = value.abs().amax(), (before - own - value).abs().amax()
    largest = torch.stack([size, own.abs().amax(), before.abs().amax()]).amax()
    rounding = 16 * torch.finfo(largest.dtype).eps * largest
    if not bool(size > 4 * rounding):  # nor if one of them is not finite
        return False
    if bool(rest <= rounding):
        warnings.warn(
            "the closure does not zero the gradients: those of the second evaluation were added "
            "to those of the first, and every step will be wrong. Call opt.zero_grad() in it, "
            "before the backward pass",
            RuntimeWarning,
            stacklevel=users_level(),
        )
    return True
