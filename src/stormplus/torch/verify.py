"""`verify_closure`: does a closure evaluate the same sample each time it is called?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stormplus.torch.norms import accumulator_dtype
from stormplus.torch.optimizer import StormOptimizer
from stormplus.torch.same_sample import require_pairs
from stormplus.torch.sharding import local
from stormplus.torch.work import name_of


def verify_closure(opt: StormOptimizer, closure: Callable[[], Any], *, rtol: float = 1e-4) -> None:
    """Evaluate the closure twice at the present point and compare the gradients.

    Parameters, gradients and random streams are left as they were. Running statistics
    (BatchNorm) are not: they see the sample twice.

    Args:
        opt: The optimizer that will call the closure; its `replay_rng` is honoured.
        closure: As for `opt.step`.
        rtol: How much a gradient may differ, relative to its norm; zero on a
            deterministic device, more where kernels are not.

    Raises:
        RuntimeError: With the name of the first parameter whose gradients differ.
    """
    require_pairs(opt, "verify_closure")
    params = [p for group in opt.param_groups for p in group["params"] if p.requires_grad]
    before = [p.grad for p in params]
    streams = opt._random_streams()
    try:
        for p in params:
            p.grad = None
        torch.enable_grad()(closure)()
        first = [None if p.grad is None else local(p.grad).clone() for p in params]
        if all(g is None for g in first):
            raise RuntimeError("the closure left no gradient: it must call loss.backward()")
        if opt._options.replay:
            streams.rewind()
        torch.enable_grad()(closure)()
        for p, g in zip(params, first):
            _compare(name_of(opt.param_groups, p), g, p.grad, rtol)
    finally:
        streams.rewind()
        for p, grad in zip(params, before):
            p.grad = grad


def _compare(name: str, first: Tensor | None, grad: Tensor | None, rtol: float) -> None:
    if first is None and grad is None:
        return
    if first is None or grad is None:
        raise RuntimeError(f"only one of two evaluations gave {name} a gradient: {_ADVICE}")
    second = local(grad)
    first, second = (t.to(accumulator_dtype(t.device)) for t in (first, second))
    size = float(torch.linalg.vector_norm(first))
    off = float(torch.linalg.vector_norm(second - first))
    if off <= rtol * size:
        return
    if not math.isfinite(off):
        raise RuntimeError(f"the gradient of {name} is not finite at the present point")
    doubled = float(torch.linalg.vector_norm(second - 2 * first)) <= rtol * size
    raise RuntimeError(
        f"two evaluations at the same point give {name} gradients that differ by "
        f"{off:.3g} (norm {size:.3g}): "
        + (
            "the closure does not zero the gradients; call opt.zero_grad() in it"
            if doubled
            else _ADVICE
        )
    )


_ADVICE = (
    "the closure must evaluate ONE sample each time. Draw the batch outside it, name any "
    "generator of your own in replay_rng=[...], and keep no state in the loss"
)
