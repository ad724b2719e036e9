"""The passes as native code for the CPU: one call for all tensors of a bundle (native.c).

The library is built when the package is installed, if there is a C compiler, and is found beside
this file; it is never compiled at run time. It is plain C behind ctypes, not torch's own interface
for extensions: so one build serves every version of torch and of Python, and takes a second.
The price is that what pointers cannot tell is checked here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stormplus.torch.core.kernels import PLAIN, flat_views
from stormplus.torch.core.tensors import Bundle, Item

_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}


def load(folder: Path = Path(__file__).parent) -> ctypes.CDLL | None:
    """The library beside this file, or None if it is not there or does not load."""
    for path in sorted(folder.glob("_native.*")):
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # of another platform, or without OpenMP's library
            continue
    return None


class Native:
    """Native passes. What they cannot take goes the plain way: tensors of different layouts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def probe(self, bundle: Bundle, out: Tensor) -> None:
        taken, rest = _sort(bundle)
        pointers = _pointers([item.g for item in taken.items])
        if self._call("probe", taken, pointers) != 0:
            out[0] += torch.nan
        PLAIN.probe(rest, out)

    def move(self, bundle: Bundle, alpha: Tensor) -> None:
        taken, rest = _sort(bundle)
        numbers = (alpha.item(), bundle.sign, bundle.l2, bundle.decoupled)
        self._call("move", taken, *_streams(taken), *map(ctypes.c_double, numbers))
        if taken.items:  # autograd has not seen it
            torch.autograd.graph.increment_version([item.x for item in taken.items])
        PLAIN.move(rest, alpha)

    def estimate(
        self, bundle: Bundle, keep: Tensor, out: Tensor, *, first: bool, guard: bool
    ) -> None:
        taken, rest = _sort(bundle)
        sums = (ctypes.c_double * 2)()
        numbers = map(ctypes.c_double, (keep.item(), bundle.sign, bundle.l2))
        self._call("estimate", taken, *_streams(taken), *numbers, int(first), int(guard), sums)
        out += torch.tensor(list(sums), dtype=out.dtype)
        PLAIN.estimate(rest, keep, out, first=first, guard=guard)

    def _call(self, name: str, bundle: Bundle, *arguments: Any) -> int:
        if not bundle.items:
            return 0
        items = bundle.items
        function = self._library[f"stormplus_{name}_{_NAMES[items[0].x.dtype]}"]
        sizes = (ctypes.c_int64 * len(items))(*[item.x.numel() for item in items])
        threads = torch.get_num_threads()
        found: int = function(ctypes.c_int64(len(items)), sizes, *arguments, threads)
        if found < 0:
            raise MemoryError("the native passes found no memory for their lists")
        return found


def suits(bundle: Bundle) -> bool:
    """Whether native passes can take tensors of this kind, and nobody looks on."""
    return (
        bundle.device.type == "cpu"
        and bundle.items[0].x.dtype in _NAMES
        and not torch._C._len_torch_dispatch_stack()
    )


def _streams(bundle: Bundle) -> tuple[Any, Any, Any]:
    items = bundle.items
    d = [item.buffers[0] for item in items]
    return _pointers([item.x for item in items]), _pointers(d), _pointers([i.g for i in items])


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _sort(bundle: Bundle) -> tuple[Bundle, Bundle]:
    """What is laid out alike, and the rest."""
    taken = [item for item in bundle.items if _alike(item)]
    if len(taken) == len(bundle.items):
        return bundle, replace(bundle, items=[])
    rest = [item for item in bundle.items if not _alike(item)]
    return replace(bundle, items=taken), replace(bundle, items=rest)


def _alike(item: Item) -> bool:
    x, g, buffers, _ = item
    if g is not None and g.dtype != x.dtype:
        return False
    tensors = (x, *buffers) if g is None else (x, g, *buffers)
    return all(t.is_contiguous() for t in tensors) or flat_views(*tensors) is not None


_LIBRARY = load()
NATIVE = None if _LIBRARY is None else Native(_LIBRARY)
