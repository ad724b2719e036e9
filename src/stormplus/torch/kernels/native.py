"""The passes on CPUs, in C: one call of native.c for all tensors of a group.

The library is built when the package is installed, if there is a C compiler; nothing is compiled at
run time. It is plain C behind ctypes and not a torch extension, so that one build serves every
version of torch and Python. On a CPU no pass is skipped by a flag: `skip` is ignored.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
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
    """The same as `Arguments` in native.c; what a pass does not use is zero."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("sizes", ctypes.c_char_p),
        ("params", ctypes.c_char_p),
        ("grads", ctypes.c_char_p),
        ("estimators", ctypes.c_char_p),
        ("z_minus_x", ctypes.c_char_p),
        ("grad_rms", ctypes.c_char_p),
        ("initial_sample", ctypes.c_char_p),
        ("masters", ctypes.c_char_p),
        ("samples", ctypes.c_char_p),
        ("sums", ctypes.POINTER(ctypes.c_double)),
        ("threads", ctypes.c_int),
        ("sign", ctypes.c_double),
        ("l2", ctypes.c_double),
        ("dtype", ctypes.c_int),
        ("state_dtype", ctypes.c_int),
        ("alpha", ctypes.c_double),
        ("one_minus_a", ctypes.c_double),
        ("finite_only", ctypes.c_int),
        ("coefficients", ctypes.c_char_p),
    ]


def any_nonfinite(group: TensorGroup) -> Any:
    """See plain.py."""
    return any(_run("any_nonfinite", group)[::2])


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """See plain.py."""
    _run("move", group, **_pair_lists(group), alpha=alpha)
    _increment_version(group.params)  # autograd has not seen the writes


def estimate(
    group: TensorGroup, one_minus_a: Number, *, finite_only: bool, skip: Any = None
) -> Numbers:
    """See plain.py."""
    options = {"one_minus_a": one_minus_a, "finite_only": finite_only}
    sums = _run("estimate", group, **_pair_lists(group), **options)
    return sum(sums[::2]), sum(sums[1::2])


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> Numbers:
    """See plain.py."""
    sums = _run(
        "untuned_step",
        group,
        params=_addresses(group.params),
        z_minus_x=_addresses(group.z_minus_x),
        grad_rms=_addresses(group.grad_rms),
        initial_sample=_addresses(group.initial_sample),
        masters=_addresses(group.masters),
        samples=b"".join([sampled.packed for sampled in group.coordinates]),
        state_dtype=_DTYPES[group.z_minus_x[0].dtype],
        # The numbers of a tensor are adjacent.
        coefficients=np.array(coefficients, np.float64).tobytes("F"),
    )
    _increment_version(group.params)  # autograd has not seen the writes
    per_tensor: Numbers = np.frombuffer(sums).reshape(-1, 2).T
    return per_tensor


def _pair_lists(group: TensorGroup) -> dict[str, Any]:
    lists = {"params": _addresses(group.params), "estimators": _addresses(group.estimators)}
    return lists | {"sign": group.sign, "l2": group.l2}


def _addresses(tensors: Sequence[Tensor]) -> bytes:
    return _packed([t.data_ptr() for t in tensors])


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"{len(numbers)}q", *numbers)


def _run(name: str, group: TensorGroup, **arguments: Any) -> Any:
    """Run a pass with the lists and numbers that it uses; return its sums, two per tensor."""
    count = len(group.params)
    sums = (ctypes.c_double * (2 * count))()
    packed = _Arguments(
        count=count,
        sizes=_packed([x.numel() for x in group.params]),
        grads=_addresses(group.grads),
        sums=sums,
        threads=torch.get_num_threads(),
        dtype=_DTYPES[group.params[0].dtype],
        **arguments,
    )
    if getattr(LIBRARY, f"stormplus_{name}")(ctypes.byref(packed)) < 0:
        raise MemoryError("the native passes could not allocate their chunks")
    return sums
