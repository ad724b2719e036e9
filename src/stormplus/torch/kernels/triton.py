"""The passes on GPUs: the number of launches does not depend on the number of tensors.

Triton comes with torch for CUDA, ROCm and XPU. The first pass imports it, and triton_kernels.py
with the code for the device, not `import stormplus`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from stormplus.torch._tensors import Number, Numbers, TensorGroup, accumulator_dtype
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus.untuned_rule import INTERPOLATION
from stormplus.versions import version_increment

_HAS_TRITON = find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK = 8192  # elements per program; a multiple of _BLOCK
_BLOCK = 1024  # elements at a time: two loads of 16 bytes per thread in float32
_increment_version = version_increment()


def supports(x: Tensor, grad: Tensor, *state: Tensor) -> bool:
    """Return whether these tensors, which have the same layout, can be handled; float64 cannot."""
    return (
        x.device.type in ("cuda", "xpu")  # ROCm reports "cuda"
        and x.dtype in _DTYPES
        and grad.dtype in _DTYPES
        and all(t.dtype in (torch.float32, torch.bfloat16) for t in state)
        and _HAS_TRITON
    )


def any_nonfinite(group: TensorGroup) -> Any:
    """See plain.py."""
    found = torch.zeros((), dtype=torch.uint8, device=group.device)  # Triton 3.0 stores no bool
    tables = _tables(g=group.grads)
    _launch("nonfinite_kernel", len(tables["chunks"]), **tables, found=found)
    return found.view(torch.bool)


def move(group: TensorGroup, alpha: Number, skip: Tensor | None = None) -> None:
    """See plain.py."""
    tables = _pair_tables(group)
    _launch("move_kernel", len(tables["chunks"]), **tables, alpha=alpha, skip=skip)
    _increment_version(group.params)  # autograd has not seen the writes


def estimate(
    group: TensorGroup, one_minus_a: Number, *, finite_only: bool, skip: Any = None
) -> Numbers:
    """See plain.py. If the pass is skipped, both are zero."""
    tables = _pair_tables(group)
    sums = _empty_sums(group, 2, len(tables["chunks"]))
    flags = {"FINITE_ONLY": finite_only, "skip": skip}
    arguments = tables | flags | {"one_minus_a": one_minus_a, "g_sq": sums[0], "d_sq": sums[1]}
    _launch("estimate_kernel", len(tables["chunks"]), **arguments)
    return sums.sum(1)


def untuned_step(
    group: TensorGroup, coefficients: UntunedCoefficients, skip: Tensor | None = None
) -> Numbers:
    """See plain.py. If the pass is skipped, the sums of u^2 are zero."""
    params = group.params
    tables = _tables(
        x=params,
        g=group.grads,
        e=group.z_minus_x,
        s=group.grad_rms,
        master=group.masters or params,
        z_1=group.initial_sample,
        index=[sampled.index for sampled in group.coordinates],
        in_whole=[sampled.in_whole for sampled in group.coordinates],
        counts=[sampled.count_here for sampled in group.coordinates],
    )
    chunk_u_sq = _empty_sums(group, len(tables["chunks"]))
    sums = _empty_sums(group, 2, len(params))
    arguments = tables | {k: row.contiguous() for k, row in coefficients._asdict().items()}
    arguments |= {
        "chunk_u_sq": chunk_u_sq,
        "u_sq": sums[0],
        "displacement_sq": sums[1],
        "skip": skip,
    }
    arguments |= {"HAS_MASTER": bool(group.masters), "B": INTERPOLATION}
    _launch("untuned_kernel", len(tables["chunks"]), **arguments)
    _launch("measure_kernel", len(params), **arguments)
    _increment_version(params)  # autograd has not seen the writes
    return sums


def _pair_tables(group: TensorGroup) -> dict[str, Any]:
    lists = {"x": group.params, "g": group.grads, "d": group.estimators}
    return _tables(**lists) | {"sign": group.sign, "l2": group.l2 or None}


def _empty_sums(group: TensorGroup, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=accumulator_dtype(group.device), device=group.device)


# -- launching -------------------------------------------------------------------------------------

_captured_uploads: list[object] = []


def _tables(**lists: Sequence[Any]) -> dict[str, Any]:
    """Return the tables in which a kernel finds its elements.

    A list of tensors x, as the first one must be, becomes "x_table", their addresses on the device,
    and "x_like", one of them; a list of numbers keeps its name. "aligned" says whether all
    addresses of a tensor are multiples of 16. "chunks" has the tensor, the start and the stop of
    each chunk, and "first_chunks" the first chunk of each tensor.
    """
    tensors = next(iter(lists.values()))
    device, sizes, tables, rows = tensors[0].device, tuple([t.numel() for t in tensors]), {}, {}
    for name, values in lists.items():
        if isinstance(values[0], Tensor):
            tables[f"{name}_like"] = values[0]
            rows[f"{name}_table"] = [t.data_ptr() for t in values]
        else:
            rows[name] = list(values)
    addresses = [row for name, row in rows.items() if name.endswith("_table")]
    rows["aligned"] = [all(p % 16 == 0 for p in pointers) for pointers in zip(*addresses)]
    numbers = _upload(device, tuple(chain(*rows.values())), False)
    tables |= zip(rows, numbers.view(len(rows), -1))
    split = _upload(device, sizes, True)
    tables["chunks"] = split[: -len(sizes) - 1].view(-1, 3)
    tables["first_chunks"] = split[-len(sizes) - 1 :]
    return tables


def _upload(device: torch.device, numbers: tuple[int, ...], split: bool) -> Tensor:
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return _uploaded_once(device, numbers, split)[1]
    # A captured copy runs at each replay, and not before. It reads the pinned memory again, which
    # must stay as it is until then; and outside the graph its result cannot be relied on.
    uploaded = _uploaded_once.__wrapped__(device, numbers, split)
    _captured_uploads.append(uploaded)
    return uploaded[1]


@lru_cache(maxsize=32)
def _uploaded_once(
    device: torch.device, numbers: tuple[int, ...], split: bool
) -> tuple[Tensor, Tensor]:
    """Return numbers, or the chunks of tensors with these sizes, on the host and on the device."""
    if split:
        starts = [(i, start) for i, n in enumerate(numbers) for start in range(0, n, _CHUNK)]
        chunks = chain(*((i, start, min(start + _CHUNK, numbers[i])) for i, start in starts))
        numbers = (*chunks, 0, *accumulate(-(-n // _CHUNK) for n in numbers))
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        host = host.pin_memory()  # so that the copy does not wait
    return host, host.to(device, non_blocking=True)


def _launch(name: str, programs: int, **arguments: Any) -> None:
    """Run a kernel with those of the arguments that it takes."""
    kernel = getattr(import_module("stormplus.torch.kernels.triton_kernels"), name)
    device = arguments["chunks"].device
    taken = {name: arguments[name] for name in kernel.arg_names if name != "BLOCK"}
    with nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device):
        # As in native.c, products are not fused with sums. Triton's default is about to change.
        kernel[(programs,)](**taken, BLOCK=_BLOCK, enable_fp_fusion=False)
