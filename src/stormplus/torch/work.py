"""From parameter groups to batches: which tensors take part in a pass, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from stormplus.torch.fused import Fused
from stormplus.torch.kernels import BLOCK, Batch, Foreach, Kernels, Plain
from stormplus.torch.norms import Groups, accumulator_dtype, blocks, square_norm
from stormplus.torch.options import Options
from stormplus.torch.sharding import local, local_gradient, norm_groups
from stormplus.torch.state import drop_buffers, settle_buffer, settle_scalars

State = dict[str, Any]

_PLAIN, _FOREACH, _FUSED = Plain(), Foreach(), Fused()

JOINED, FROZEN = 1, -1  # what `joined` says of a parameter; 0 before its first gradient


@dataclass
class Work:
    """What one pass has to do."""

    sizes: list[int]  # trainable elements in each bucket
    active: list[bool]  # buckets that have had a gradient
    known: dict[Any, Batch] = field(default_factory=dict)  # parameters with an estimator
    joining: dict[Any, Batch] = field(default_factory=dict)  # those that get their first: d <- g
    newcomers: list[State] = field(default_factory=list)  # the states of those
    process_groups: list[Groups] = field(default_factory=list)

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        yield from ((batch, False) for batch in self.known.values())
        yield from ((batch, True) for batch in self.joining.values())


def gather(
    param_groups: list[dict[str, Any]],
    states: dict[Tensor, State],
    home: State,
    options: Options,
    buffers: tuple[str, ...] = ("estimator",),
) -> Work:
    """Sort the parameters into batches; what cannot be handled is refused before any move."""
    settle_scalars(home, next(p for p, state in states.items() if state is home).device)
    buckets, scope = len(home["step"]), options.scope
    work = Work(sizes=[0] * buckets, active=[False] * buckets)
    coefficients = _Coefficients(home)
    places = enumerate((i, p) for i, group in enumerate(param_groups) for p in group["params"])
    for place, (i, p) in places:
        bucket = 0 if scope == "global" else i if scope == "group" else place
        state, g = states[p], p.grad
        if not p.requires_grad:  # never moved, and its estimator is dropped
            drop_buffers(state)
            state["joined"] = FROZEN
            continue
        work.sizes[bucket] += p.numel() * (2 if p.is_complex() else 1)
        process_groups = norm_groups(p)
        if process_groups not in work.process_groups:
            work.process_groups.append(process_groups)
        if state["joined"] == FROZEN and g is not None and not bool(g.any()):
            g = None  # zeros left from before it was frozen say nothing
        # Beyond the paper: who has no gradient yet waits, and takes d = g at the first one;
        # from then on a missing gradient is a zero gradient.
        if g is None and state["joined"] != JOINED:
            continue
        if g is not None and g.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {name_of(param_groups, p)} is sparse ({g.layout}), which is not "
                "supported: make it dense, for example with nn.Embedding(..., sparse=False)"
            )
        work.active[bucket] = True
        if state["joined"] != JOINED:
            work.newcomers.append(state)
        for name in buffers:
            settle_buffer(p, state, name)
        x, d = local(p), local(state["estimator"])
        table = work.known if state["joined"] == JOINED else work.joining
        key = (i, bucket, process_groups, x.device, x.dtype, d.dtype, g is None)
        if key not in table:
            table[key] = coefficients.batch(param_groups[i], bucket, x.device, g is not None)
            table[key].process_groups = process_groups
        table[key].xs.append(x)
        table[key].ds.append(d)
        table[key].states.append(state)
        if g is not None:
            table[key].gs.append(local_gradient(p, g))
    work.sizes = [max(size, 1) for size in work.sizes]
    return work


class _Coefficients:
    """The numbers that the tensors of a batch share."""

    def __init__(self, home: State) -> None:
        self.keep = (1 - home["gain"]).unbind()
        self.eta = home["step_size"].unbind()
        self.d_norm = home["estimator_norm_sq"].sqrt().unbind()

    def batch(
        self, group: dict[str, Any], bucket: int, device: torch.device, has_grad: bool
    ) -> Batch:
        def here(number: Tensor) -> Tensor:
            return number.to(device, accumulator_dtype(device), non_blocking=True)

        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.to(self.eta[bucket], non_blocking=True).reshape(())
        # Beyond the paper: lr, "initial step-size" in its experiments and 1 in its analysis.
        alpha = lr * self.eta[bucket]
        if group["max_move"] is not None:
            # Beyond the paper: lr eta |d| <= max_move, with |d| over the bucket.
            alpha = torch.minimum(alpha, group["max_move"] / self.d_norm[bucket])
        decay, decoupled = float(group["weight_decay"]), group["decoupled_weight_decay"]
        return Batch(
            alpha=here(alpha),
            keep=here(self.keep[bucket]),
            sign=-1.0 if group["maximize"] else 1.0,
            l2=0.0 if decoupled else decay,
            decoupled=decay if decoupled else 0.0,
            lr=lr,
            bucket=bucket,
            has_grad=has_grad,
            kernels=_kernels(group, device),
        )


def _kernels(group: dict[str, Any], device: torch.device) -> Kernels:
    if group["fused"]:
        return _FUSED
    # On the CPU torch's multi-tensor operations are loops, and blocks in the cache win.
    foreach = device.type in ("cuda", "xpu") if group["foreach"] is None else group["foreach"]
    return _FOREACH if foreach else _PLAIN


def name_of(param_groups: list[dict[str, Any]], p: Tensor) -> str:
    for i, group in enumerate(param_groups):
        for j, q in enumerate(group["params"]):
            if q is p:
                where = f"parameter {j} of group {i}"
                named = group.get("param_names")
                return f"{where} ('{named[j]}')" if named else f"{where}, shape {tuple(p.shape)}"
    raise KeyError("not a parameter of this optimizer")


def blame(param_groups: list[dict[str, Any]]) -> str:
    """What is not finite, by name."""
    for p in (p for group in param_groups for p in group["params"]):
        if p.requires_grad and p.grad is not None:
            parts = [square_norm(block) for (block,) in blocks(BLOCK, local(p.grad))]
            if not all(bool(torch.isfinite(part)) for part in parts):
                return (
                    f"the squared norm of the gradient of {name_of(param_groups, p)} is not finite"
                )
    return (
        "a squared norm or a sum of them is not finite: of a gradient on another process, of a "
        "parameter under weight decay, or of the estimator"
    )


class FreshGradients:
    """Checks that an evaluation has written a gradient since this was made.

    Trainers that step without a closure may pass an empty one instead: both gradients would
    silently be the same tensor. Weak references, for gradients must be free to go.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._seen = [
            (p, TensorWeakRef(p.grad), p.grad._version) for p in params if p.grad is not None
        ]

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
