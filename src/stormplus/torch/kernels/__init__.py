"""The passes over memory, in four backends that compute the same.

Each is a module with these functions, which take a `TensorGroup` and a few numbers:

    any_nonfinite   whether a gradient has a NaN or an infinity
    move            x <- x - alpha d,  d <- d - g~             first half of a pair
    estimate        d <- g + (1 - a) d, with |g|^2 and |d|^2   second half of a pair
    untuned_step    one step of `Untuned`

`plain` is the specification, for any tensor, one at a time; `multi_tensor` runs on every device
with few launches; `native` and `triton` are for CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from stormplus.torch.kernels import multi_tensor, native, plain, triton


def choose_kernels(tensors: Sequence[Tensor], foreach: bool | None) -> ModuleType:
    """Return the fastest backend that can handle a parameter.

    Args:
        tensors: The parameter, its gradient, and the tensors of its state that have its shape.
        foreach: False asks for `plain`; True rules out `native`.
    """
    x, compiling = tensors[0], torch.compiler.is_compiling()
    if foreach is False or not x.numel():
        return plain
    on_cpu, contiguous = x.device.type == "cpu", all(t.is_contiguous() for t in tensors)
    # A TorchDispatchMode would not see what native and Triton kernels write.
    if not compiling and not torch._C._len_torch_dispatch_stack() and contiguous:
        is_native = on_cpu and not foreach and native.supports(*tensors)
        if is_native or triton.supports(*tensors):
            if not all(t.data_ptr() for t in tensors):  # a tensor subclass that wraps others
                return plain
            return native if is_native else triton
    # On a CPU torch's multi-tensor operations are loops, and their copies cost memory: five times
    # the time of `plain` on a tensor of 100 M.
    return plain if on_cpu and not compiling else multi_tensor
