"""How many kernels a step starts on a device: counted on tensors without memory.

Each call of torch's dispatcher that computes something counts as one launch (a multi-tensor call
takes one for some hundred tensors), and so does each call of a compiled function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.optim import Optimizer

from stormplus.torch import PairedOptimizer

# Calls that look at a tensor in another way, reserve memory, or read a number on the host.
_NO_LAUNCH = {
    "_local_scalar_dense", "as_strided", "detach", "empty", "empty_like", "expand", "item",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "unbind",
    "unsqueeze", "view", "view_as_real",
}  # fmt: skip


def launches(make: Callable[[list[nn.Parameter]], Optimizer], shapes: list[torch.Size]) -> int:
    """Count the launches of a step, of both halves for a paired optimizer.

    Args:
        make: Makes the optimizer; `check_finite=False`, since nothing can be read here.
        shapes: Of the parameters.
    """
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    opt = make(params)

    def step() -> None:
        if not isinstance(opt, PairedOptimizer):
            opt.step()
            return
        if opt.started:
            opt.move()
        opt.estimate()

    step()
    step()  # the first is another, the second may compile
    with profile(use_kineto=False) as found:
        step()
    return sum(map(_launches, found.function_events))


def _launches(event: Any) -> bool:
    if event.name.startswith("Torch-Compiled Region"):
        return True
    if not event.name.startswith("aten::") or _inside_another(event):
        return False
    name = event.name.removeprefix("aten::")
    return name not in _NO_LAUNCH and not (name == "to" and not event.cpu_children)


def _inside_another(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(("aten::", "Torch-Compiled Region")):
            return True
        parent = parent.cpu_parent
    return False
