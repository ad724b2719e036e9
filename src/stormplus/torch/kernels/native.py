"""The passes on CPUs, in C: one call of native.c for all tensors of a group.

The library is built when the package is installed, if there is a C compiler; nothing is compiled at
run time. It is plain C behind ctypes and not a torch extension, so that one build serves every
version of torch and Python. On a CPU no pass is skipped by a flag: `skip` is ignored.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stormplus.torch._tensors import Number, Numbers, TensorGroup, wide_dtype
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus.versions import version_increment

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
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
        and x.dtype in _DTYPES
        and grad.dtype == x.dtype
        and all(t.dtype == wide or (t.dtype == half and wide == torch.float32) for t in state)
    )


class _Arguments(ctypes.Structure):
    """The same as `Arguments` in native.c."""

    _fields_ = [
        ("tensors", ctypes.c_char_p),
        ("count", ctypes.c_int64),
        ("sums", ctypes.POINTER(ctypes.c_double)),
        ("threads", ctypes.c_int),
        ("sign", ctypes.c_double),
        ("l2", ctypes.c_double),
        ("dtype", ctypes.c_int),
        ("state_dtype", ctypes.c_int),
        ("alpha", ctypes.c_double),
        ("one_minus_a", ctypes.c_double),
        ("first", ctypes.c_int),
        ("finite_only", ctypes.c_int),
        ("coefficients", ctypes.c_char_p),
    ]


def any_nonfinite(group: TensorGroup) -> Any:
    """See plain.py."""
    return any(_run("any_nonfinite", group)[::2])


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """See plain.py."""
    _run("move", group, alpha=alpha)
    _increment_version(group.params)  # autograd has not seen the writes


def estimate(
    group: TensorGroup, one_minus_a: Number, *, first: bool, finite_only: bool, skip: Any = None
) -> tuple[Number, Number]:
    """See plain.py."""
    sums = _run("estimate", group, one_minus_a=one_minus_a, first=first, finite_only=finite_only)
    return sum(sums[::2]), sum(sums[1::2])


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> Numbers:
    """See plain.py."""
    rows = np.array(coefficients, np.float64).tobytes("F")  # those of a tensor are adjacent
    state_dtype = _DTYPES[group.z_minus_x[0].dtype]
    sums = _run("untuned_step", group, coefficients=rows, state_dtype=state_dtype)
    _increment_version(group.params)  # autograd has not seen the writes
    per_tensor: Numbers = np.frombuffer(sums).reshape(-1, 2).T
    return per_tensor


def _run(name: str, group: TensorGroup, **arguments: Any) -> Any:
    """Run a pass, and return its sums, two per tensor."""
    table, count = group.backend_cache or _table(group), len(group.params)
    group.backend_cache = table if name == "any_nonfinite" else None  # for the pass that follows
    sums = (ctypes.c_double * (2 * count))()
    packed = _Arguments(
        tensors=table,
        count=count,
        sums=sums,
        threads=torch.get_num_threads(),
        sign=group.sign,
        l2=group.l2,
        dtype=_DTYPES[group.params[0].dtype],
        **arguments,
    )
    if getattr(LIBRARY, f"stormplus_{name}")(ctypes.byref(packed)) < 0:
        raise MemoryError("the native passes could not allocate their chunks")
    return sums


def _table(group: TensorGroup) -> bytes:
    """Return an array of `Tensor` as in native.c; what the optimizer does not have is zero."""
    rows: list[int] = []
    if group.estimators:
        for x, g, d in zip(group.params, group.grads, group.estimators):
            rows += (x.numel(), x.data_ptr(), g.data_ptr(), d.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0)
    else:
        lists = group.z_minus_x, group.grad_rms, group.initial_sample, group.coordinates
        masters = group.masters or group.params  # which are not used
        for x, g, y, e, s, z_1, sampled in zip(group.params, group.grads, masters, *lists):
            rows += (x.numel(), x.data_ptr(), g.data_ptr(), 0, e.data_ptr(), s.data_ptr())
            rows += (z_1.data_ptr(), y.data_ptr(), sampled.count_here, sampled.stride)
            rows += (sampled.index.data_ptr(), sampled.in_whole.data_ptr())
    return struct.pack(f"{len(rows)}q", *rows)
