"""The passes on CPUs, in C: one call of native.c for all tensors of a group.

The library is built when the package is installed, if there is a C compiler; nothing is compiled at
run time. It is plain C behind ctypes and not a torch extension, so that one build serves every
version of torch and Python. What a pointer cannot say is checked in `supports`.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stormplus.torch._tensors import Number, Numbers, Objective, TensorGroup, wide_dtype
from stormplus.torch.kernels import plain
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus.versions import version_increment

_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
_increment_version = version_increment()


def load_library(folder: Path = Path(__file__).parent) -> ctypes.CDLL | None:
    """Return the compiled library, or None if it was not built or does not load here."""
    for path in sorted(folder.glob("_native.*")):
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # built for another platform, or OpenMP's library is missing
            continue
    return None


LIBRARY = load_library()


def supports(x: Tensor, grad: Tensor, *state: Tensor) -> bool:
    """Return whether these tensors, which have the same layout, can be handled."""
    wide, half = wide_dtype(x.dtype), torch.bfloat16
    return (
        LIBRARY is not None
        and x.dtype in _NAMES
        and grad.dtype == x.dtype
        and all(t.dtype == wide or (t.dtype == half and wide == torch.float32) for t in state)
    )


class _Objective(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in Objective._fields]


_POINTER, _BYTES, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_double
_ARGUMENTS: dict[str, tuple[Any, ...]] = {  # after the tensors, their number and the threads
    "any_nonfinite": (),
    "move": (_DOUBLE, _POINTER),
    "estimate": (_DOUBLE, _POINTER, _INT, _INT, _POINTER),
    "untuned_step": (_BYTES, _POINTER),
}


def any_nonfinite(group: TensorGroup) -> Any:
    """See plain.py."""
    group.native_table = _table(group)  # kept for the pass that follows
    return _call("any_nonfinite", group) != 0


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """See plain.py. Skipping is for devices."""
    _call("move", group, float(alpha), ctypes.byref(_Objective(*group.objective)))
    _increment_version(group.params)  # autograd has not seen the writes


def estimate(
    group: TensorGroup,
    one_minus_a: Number,
    *,
    first: bool,
    finite_only: bool,
    skip: Tensor | None = None,
) -> tuple[Number, Number]:
    """See plain.py. Skipping is for devices."""
    sums, objective = (ctypes.c_double * 2)(), ctypes.byref(_Objective(*group.objective))
    _call("estimate", group, float(one_minus_a), objective, first, finite_only, sums)
    return sums[0], sums[1]


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> Numbers:
    """See plain.py. Skipping is for devices."""
    count = len(group.params)
    by = np.array(coefficients, np.float64).tobytes("F")  # those of a tensor are adjacent
    sums = (ctypes.c_double * (2 * count))()
    _call("untuned_step", group, by, sums)
    _increment_version(group.params)  # autograd has not seen the writes
    found = np.frombuffer(sums).reshape(2, count)  # type: ignore[call-overload]
    for i, sample in enumerate(group.samples):
        if sample.stride and not group.params[i].is_contiguous():
            found[1, i] = plain.squared_displacement(group, i)
    return found


def _call(name: str, group: TensorGroup, *arguments: Any) -> int:
    table = group.native_table or _table(group)
    if name != "any_nonfinite":
        group.native_table = None
    state = group.z_minus_x[0].dtype if name == "untuned_step" else None
    function = _function(name, group.params[0].dtype, state)
    found = function(table, len(group.params), torch.get_num_threads(), *arguments)
    if found < 0:
        raise MemoryError("the native passes could not allocate their lists")
    return int(found)


@cache
def _function(name: str, dtype: torch.dtype, state_dtype: torch.dtype | None) -> Any:
    state = "_bf16_state" if state_dtype == torch.bfloat16 else ""
    function = getattr(LIBRARY, f"stormplus_{name}{state}_{_NAMES[dtype]}")
    function.argtypes = (_BYTES, ctypes.c_int64, _INT, *_ARGUMENTS[name])
    return function


def _table(group: TensorGroup) -> bytes:
    """Return an array of `Tensor` as in native.c."""
    rows: list[int] = []
    if group.estimators:
        for x, g, d in zip(group.params, group.grads, group.estimators):
            rows += (x.numel(), x.data_ptr(), g.data_ptr(), d.data_ptr(), 0, 0, 0, 0, 0, 0)
    masters = group.masters or group.params
    for x, g, e, s, z_1, master, sample in zip(
        group.params,
        group.grads,
        group.z_minus_x,
        group.grad_rms,
        group.initial_sample,
        masters,
        group.samples,
    ):
        # native.c measures in the order of memory; the sample is in row-major order.
        stride = sample.stride if x.is_contiguous() else 0
        rows += (x.numel(), x.data_ptr(), g.data_ptr(), 0, e.data_ptr(), s.data_ptr())
        rows += (z_1.data_ptr(), master.data_ptr(), stride, sample.offset)
    return struct.pack(f"{len(rows)}q", *rows)
