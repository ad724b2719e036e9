"""The passes over memory of the paired optimizers, on bundles of tensors.

    probe:     is g~ finite?                                          reads g~
    move:      x <- x - alpha d,  d <- d - g~                         reads x, d, g~  writes x, d
    estimate:  d <- g + (1 - a) d, with |g|^2 and |d|^2 on the way    reads d, g      writes d

Between the two, d holds the innovation d_t - g~_t. That is 8 streams of the parameters' size, and
9 with the probe (Adam's fused step has 7).

Written four ways: `Plain` goes chunk by chunk, `Foreach` uses torch's multi-tensor operations,
`Native` makes one call of native.c for all tensors of a bundle, and `Compiled` (compiled.py) is one
compiled kernel with dynamic shapes.

The native library is built when the package is installed, if there is a C compiler, and is found
beside this file; it is never compiled at run time. It is plain C behind ctypes, not torch's own
interface for extensions: so one build serves every version of torch and of Python, and takes a
second. The price is that what pointers cannot tell is checked here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stormplus.torch.core.state import accumulator_dtype, wide_dtype
from stormplus.torch.core.tensors import Bundle, Item
from stormplus.versions import version_increment

increment_version = version_increment()

# 2^19 float32 elements are 2 MB: a chunk and its temporaries stay in the cache.
CHUNK = 1 << 19


Number: TypeAlias = float | Tensor  # a tensor if it comes from a device, where to look is to wait


def tensor_of(number: Number, device: torch.device) -> Tensor:
    """As precise as the run's numbers are."""
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=accumulator_dtype(device), device=device)


class Kernels(Protocol):
    """One way of running the passes. `out` takes sums: a kernel adds to it."""

    def probe(self, bundle: Bundle) -> Number:
        """Say 0 if the gradients are finite, nan if not."""

    def move(self, bundle: Bundle, alpha: Number) -> None:
        """Move by alpha d, and take g~ from d."""

    def estimate(
        self, bundle: Bundle, keep: Number, out: Tensor, *, first: bool, guard: bool
    ) -> None:
        """Add g to keep d; |g|^2 and |d|^2 are added to `out`.

        Args:
            bundle: The tensors.
            keep: 1 - a.
            out: Two sums.
            first: Instead, d <- g.
            guard: Leave d alone where g is not finite.
        """


def kernels_for(bundle: Bundle) -> Kernels:
    """What the group asks for, or else what is fastest."""
    group = bundle.group
    if group["fused"]:
        from stormplus.torch.core.compiled import COMPILED  # which imports this module

        return COMPILED
    if group["foreach"] is not None:
        return FOREACH if group["foreach"] else PLAIN
    if NATIVE is not None and _suits_native(bundle):
        return NATIVE
    # On the CPU torch's multi-tensor operations are loops, and chunks in the cache win.
    return FOREACH if bundle.device.type in ("cuda", "xpu") else PLAIN


# -- walking through tensors ---------------------------------------------------------------------


def chunks(bundle: Bundle, limit: int = CHUNK) -> Iterator[tuple[Any, ...]]:
    """Pieces of at most `limit` elements: x, g (or None), and a piece of each buffer."""
    for x, g, buffers, _ in bundle.items:
        if 0 < x.numel() <= limit:
            yield (x, g, *buffers)
        elif x.numel() and g is not None:
            yield from split(limit, x, g, *buffers)
        elif x.numel():
            yield from ((x_, None, *rest) for x_, *rest in split(limit, x, *buffers))


def split(limit: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of at most `limit` elements that walk through tensors of one shape together."""
    first, flat = tensors[0], flat_views(*tensors)
    if flat is None:
        rows = max(1, limit * first.shape[0] // max(first.numel(), 1))
        return zip(*(torch.split(t, rows) for t in tensors))
    return zip(*(torch.split(t, limit) for t in flat))


def flat_views(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """One-dimensional views in the order of memory, if the tensors are laid out alike."""
    if any(t.shape != tensors[0].shape for t in tensors):
        return None
    if not all(t.is_contiguous() for t in tensors):
        strides = tensors[0].stride()
        if any(t.stride() != strides for t in tensors):
            return None
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])  # channels_last, say
        tensors = tuple(t.permute(order) for t in tensors)
        if not tensors[0].is_contiguous():
            return None
    return tuple(t.view(-1) for t in tensors)


# -- numbers -------------------------------------------------------------------------------------


class Scratch:
    """Room for the temporaries of a pass, taken once and used for every chunk.

    Fresh memory for each would cost more than the arithmetic on it. And on the CPU, where small
    results come to lie between large temporaries, it would leave holes that are not given back.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def like(self, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """Room that is laid out as t, what was in it lost; one for each name."""
        room = self._rooms.get(name)
        if room is None or room.numel() < t.numel():
            self._rooms[name] = room = torch.empty(t.numel(), dtype=dtype, device=t.device)
        flat = room[: t.numel()]
        return flat.as_strided(t.shape, t.stride()) if flat_views(t) else flat.view(t.shape)


class Objective(NamedTuple):
    """What is minimized."""

    sign: float  # -1 to maximize
    l2: float  # weight decay as a part of it
    decoupled: float  # weight decay beside it


def objective(bundle: Bundle) -> Objective:
    """By the options of the group."""
    sign = -1.0 if bundle.group["maximize"] else 1.0
    decay = float(bundle.group["weight_decay"])
    beside = bundle.group["decoupled_weight_decay"]
    return Objective(sign, 0.0, decay) if beside else Objective(sign, decay, 0.0)


def gradient(
    bundle: Bundle, x: Tensor, g: Tensor | None, scratch: Scratch | None = None
) -> Tensor | None:
    """The gradient of what is minimized, as precise as d; None stands for zero.

    Args:
        bundle: Says what is minimized.
        x: The parameters.
        g: Their gradient.
        scratch: Where the result lies, until the next one, if it is not g itself.
    """
    dtype, (sign, l2, _) = bundle.dtype, objective(bundle)
    if (g is None and not l2) or (g is not None and not l2 and sign > 0 and g.dtype == dtype):
        return g
    out = (scratch or Scratch()).like(x, dtype, "gradient")
    # Beyond the paper: L2 regularisation is part of the objective, and so of its gradient.
    if g is None:
        return torch.mul(x, l2, out=out) if x.dtype == dtype else out.copy_(x).mul_(l2)
    if l2 and sign > 0 and g.dtype == x.dtype == dtype:
        return torch.add(g, x, alpha=l2, out=out)
    torch.neg(g, out=out) if sign < 0 and g.dtype == dtype else out.copy_(g).mul_(sign)
    return out.add_(x, alpha=l2) if l2 else out


def square_norm(t: Tensor, scratch: Scratch | None = None) -> Tensor:
    """|t|^2 in float64 where the device has it.

    A float32 sum of squares loses its last digits on large tensors and overflows from 1e19 on;
    in float64 every float32 is safe. Fresh memory for a wide copy of each chunk would cost more
    than the norm: whoever needs many norms hands over a scratch for it. Nor are small results kept:
    between large temporaries they would leave holes in the memory of the CPU.
    """
    dtype, scratch = accumulator_dtype(t.device), scratch or Scratch()
    total: Tensor | None = None
    for piece in torch.split((flat_views(t) or (t.reshape(-1),))[0], CHUNK):
        wide = piece
        if piece.dtype != dtype:
            wide = scratch.like(piece, dtype, "wide").copy_(piece)
        square = torch.dot(wide, wide)
        total = square if total is None else total.add_(square)
    assert total is not None  # of nothing there is one piece too
    return total


class SquareNorms:
    """Adds |chunk|^2 to `out`, in its precision, for the tensors of one bundle."""

    def __init__(self, out: Tensor) -> None:
        self._rows, self._scratch = out.unbind(), Scratch()

    def add(self, row: int, chunk: Tensor) -> Tensor:
        """Add the squared norm of a chunk to a row of `out`; returns it too."""
        square = square_norm(chunk, self._scratch)
        self._rows[row].add_(square)
        return square


def finite_or_nan(tensors: list[Tensor], device: torch.device) -> Tensor:
    """0 if all numbers are finite, else nan."""
    tensors = [t for t in tensors if t.numel() > 0]
    if not tensors:
        return torch.zeros((), device=device)
    if device.type != "cpu":  # nan is the largest of all
        return (torch.stack(torch._foreach_norm(tensors, math.inf)) * 0).sum()
    if NATIVE is not None and not torch._C._len_torch_dispatch_stack():
        dense = [t for t in tensors if t.dtype in _NATIVE_NAMES and flat_views(t) is not None]
        dtypes = {t.dtype for t in dense}  # a gradient may have another than its parameter
        if not all(NATIVE.finite([t for t in dense if t.dtype == dtype]) for dtype in dtypes):
            return torch.tensor(math.nan)
        if len(dense) == len(tensors):
            return torch.zeros(())
    bad = [t for t in tensors if not math.isfinite(t.sum().item())]
    return torch.stack([(t * 0).sum().float() for t in bad]).sum() if bad else torch.zeros(())


def finite_part(g: Tensor) -> Tensor:
    return torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0)


def guarded(g: Tensor, g_sq: Tensor) -> Tensor:
    """The finite part of g, whose squared norm is known."""
    if g.device.type == "cpu" and math.isfinite(g_sq.item()):  # reading it costs nothing here
        return g
    return finite_part(g)


def undo_estimate(bundle: Bundle, keep: Number) -> None:
    """Take a guarded estimate back, to one rounding of g + (1 - a) d.

    Where g is so large that d was lost beside it, d comes back as zero: the same sample's
    gradient, when it is evaluated again, hides d in the same way. Where a is 1 it does so too,
    and counts for nothing.
    """
    keep = tensor_of(keep, bundle.device)
    for x, g_raw, d in chunks(bundle):
        g = gradient(bundle, x, g_raw)
        d.copy_(finite_part((d if g is None else d - finite_part(g)) / keep))


# -- the passes ----------------------------------------------------------------------------------


class Plain:
    """Chunk by chunk, so that the second operation finds its operands in the cache."""

    def probe(self, bundle: Bundle) -> Number:
        found: Number = 0.0
        for item in bundle.items:
            if item.g is None or item.g.numel() == 0:
                continue
            if bundle.device.type == "cpu" and math.isfinite(item.g.sum().item()):
                continue
            found = found + (item.g * 0).sum()  # unlike the sum itself it cannot overflow
        return found

    def move(self, bundle: Bundle, alpha: Number) -> None:
        decoupled, scratch = objective(bundle).decoupled, Scratch()
        alpha = tensor_of(alpha, bundle.device)
        for x, g_raw, d in chunks(bundle):
            g_tilde = gradient(bundle, x, g_raw, scratch)  # before x moves
            step = d
            if decoupled or x.dtype != d.dtype:
                step = scratch.like(d, d.dtype, "step")
            # Beyond the paper: weight decay beside the objective, if asked for.
            if decoupled:
                torch.add(d, x, alpha=decoupled, out=step)
            if x.dtype == d.dtype:
                x.addcmul_(step, alpha, value=-1)  # Alg. 1, line 4
            else:  # as precise as d, and rounded once
                x.sub_(torch.mul(step if decoupled else d, alpha, out=step))  # Alg. 1, line 4
            if g_tilde is not None:
                d.sub_(g_tilde)  # Alg. 1, line 6: the bracket

    def estimate(
        self, bundle: Bundle, keep: Number, out: Tensor, *, first: bool, guard: bool
    ) -> None:
        squares, scratch, keep = SquareNorms(out), Scratch(), tensor_of(keep, bundle.device)
        for x, g_raw, d in chunks(bundle):
            g = gradient(bundle, x, g_raw, scratch)
            if g is None:
                d.zero_() if first else d.mul_(keep)  # Alg. 1, line 6, with g_{t+1} = 0
            else:
                g_sq = squares.add(0, g)
                if first:
                    d.copy_(g)  # Alg. 1, line 1
                else:
                    g = guarded(g, g_sq) if guard else g
                    torch.addcmul(g, d, keep.to(d.dtype), out=d)  # Alg. 1, line 6
            squares.add(1, d)


class Foreach:
    """torch's multi-tensor operations, on lists of bounded size."""

    def probe(self, bundle: Bundle) -> Number:
        gs = [item.g for item in bundle.items if item.g is not None and item.g.numel() > 0]
        if bundle.device.type == "cpu" or not gs:
            return PLAIN.probe(bundle)
        return (torch.stack(torch._foreach_norm(gs, math.inf)) * 0).sum()  # nan is the largest

    def move(self, bundle: Bundle, alpha: Number) -> None:
        decoupled, alpha = objective(bundle).decoupled, tensor_of(alpha, bundle.device)
        for xs, gs_raw, ds in self._lists(bundle):
            g_tildes = self._gradients(bundle, xs, gs_raw)
            steps = torch._foreach_add(ds, xs, alpha=decoupled) if decoupled else ds
            torch._foreach_sub_(xs, torch._foreach_mul(steps, alpha))  # Alg. 1, line 4
            if g_tildes:
                torch._foreach_sub_(ds, g_tildes)  # Alg. 1, line 6: the bracket

    def estimate(
        self, bundle: Bundle, keep: Number, out: Tensor, *, first: bool, guard: bool
    ) -> None:
        keep = tensor_of(keep, bundle.device)
        squares = SquareNorms(out) if bundle.device.type == "cpu" else None
        norms: tuple[list[Tensor], list[Tensor]] = ([], [])  # added up at the end: few launches
        for xs, gs_raw, ds in self._lists(bundle):
            gs = self._gradients(bundle, xs, gs_raw)
            if first:
                torch._foreach_copy_(ds, gs) if gs else torch._foreach_zero_(ds)  # Alg. 1, line 1
            else:
                torch._foreach_mul_(ds, keep)
                if gs:  # Alg. 1, line 6
                    torch._foreach_add_(ds, [finite_part(g) for g in gs] if guard else gs)
            for row, tensors in enumerate((gs, ds)):
                if squares is not None:
                    for t in tensors:
                        squares.add(row, t)
                elif tensors:
                    norms[row].extend(torch._foreach_norm(tensors, 2, dtype=out.dtype))
        for total, parts in zip(out.unbind(), norms):
            if parts:
                total.add_(torch.stack(parts).square_().sum())

    @staticmethod
    def _lists(bundle: Bundle) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        # A list's length is that of the temporaries. On a device long lists are few launches; on
        # the CPU every call is a loop over the tensors anyway.
        sizes = [item.x.numel() for item in bundle.items]
        limit = max(CHUNK, max(sizes) // 4, sum(sizes) // 8)
        if bundle.device.type == "cpu":
            limit = CHUNK // 4
        xs: list[Tensor] = []
        gs: list[Tensor] = []
        ds: list[Tensor] = []
        size = 0
        for x, g, d in chunks(bundle, limit):
            if size and size + x.numel() > limit:
                yield xs, gs, ds
                xs, gs, ds, size = [], [], [], 0
            xs.append(x)
            ds.append(d)
            if g is not None:
                gs.append(g)
            size += x.numel()
        if size:
            yield xs, gs, ds

    @staticmethod
    def _gradients(bundle: Bundle, xs: list[Tensor], gs: list[Tensor]) -> list[Tensor]:
        """As `gradient`; an empty list stands for zero."""
        sign, l2, _ = objective(bundle)
        if gs and sign < 0:
            gs = list(torch._foreach_neg(gs))
        gs = [g.to(bundle.dtype) for g in gs]
        if l2 and not gs:
            return list(torch._foreach_mul([x.to(bundle.dtype) for x in xs], l2))
        return list(torch._foreach_add(gs, xs, alpha=l2)) if l2 else gs


# -- native passes -------------------------------------------------------------------------------

_NATIVE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}


_NATIVE_STATES = {  # of `Untuned`
    torch.float32: (torch.float32, torch.bfloat16),
    torch.float64: (torch.float64,),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float16: (torch.float32, torch.bfloat16),
}


def load_native(folder: Path = Path(__file__).parent) -> ctypes.CDLL | None:
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
        self._functions: dict[tuple[str, torch.dtype], Any] = {}

    def probe(self, bundle: Bundle) -> Number:
        places, items, rest = _laid_out_alike(bundle)
        if self._call("probe", places, _pointers([item.g for item in items])) != 0:
            return math.nan
        return PLAIN.probe(rest) if rest is not None else 0.0

    def move(self, bundle: Bundle, alpha: Number) -> None:
        places, items, rest = _laid_out_alike(bundle)
        numbers = (float(alpha), *objective(bundle))
        gs = _pointers([item.g for item in items])
        self._call("move", places, places.x, places.d, gs, *map(ctypes.c_double, numbers))
        if items:  # autograd has not seen it
            increment_version([item.x for item in items])
        if rest is not None:
            PLAIN.move(rest, alpha)

    def estimate(
        self, bundle: Bundle, keep: Number, out: Tensor, *, first: bool, guard: bool
    ) -> None:
        places, items, rest = _laid_out_alike(bundle)
        sums = np.zeros(2)
        sign, l2, _ = objective(bundle)
        numbers = map(ctypes.c_double, (float(keep), sign, l2))
        gs, where = _pointers([item.g for item in items]), ctypes.c_void_p(sums.ctypes.data)
        how = (int(first), int(guard), where)
        self._call("estimate", places, places.x, places.d, gs, *numbers, *how)
        out += torch.from_numpy(sums)
        if rest is not None:
            PLAIN.estimate(rest, keep, out, first=first, guard=guard)

    def finite(self, tensors: list[Tensor]) -> bool:
        """Whether all numbers are; the tensors are dense and of one dtype."""
        return self._call("probe", _Places(tensors, []), _pointers(tensors)) == 0

    def _call(self, name: str, places: _Places, *arguments: Any) -> int:
        """Call a function of the library, by the dtype of the tensors, with their sizes."""
        if places.dtype is None:
            return 0
        function = self.function(name, places.dtype)
        return _checked(function(*places.head, *arguments, torch.get_num_threads()))

    def function(self, name: str, dtype: torch.dtype) -> Any:
        """One of the library, for parameters of a dtype."""
        key = name, dtype
        if key not in self._functions:  # ctypes looks a name up anew, at some microseconds
            self._functions[key] = self._library[f"stormplus_{name}_{_NATIVE_NAMES[dtype]}"]
        return self._functions[key]


def _checked(found: int) -> int:
    if found < 0:
        raise MemoryError("the native passes found no memory for their lists")
    return found


class NativeUntuned:
    """The native pass of `Untuned` on a list of tensors: the whole step in one call.

    What stays the same from step to step is handed over once.

    Args:
        native: The library.
        items: The tensors; `suits_untuned` has approved them.
        strides: Every how many elements the distance is measured; 0 for not at all.
    """

    def __init__(self, native: Native, items: Sequence[Item], strides: Sequence[int]) -> None:
        dtype, kind = items[0].x.dtype, items[0].buffers[0].dtype == torch.bfloat16
        self._step = native.function("untuned_bf16" if kind else "untuned", dtype)
        self._probe = native.function("probe", dtype)
        xs = [item.x for item in items]
        sizes = (ctypes.c_int64 * len(items))(*[x.numel() for x in xs])
        self._head = ctypes.c_int64(len(items)), sizes
        masters = [item.buffers[3] if len(item.buffers) > 3 else None for item in items]
        self._tail = (
            *(_pointers([item.buffers[k] for item in items]) for k in range(3)),
            _pointers(masters),
            (ctypes.c_int64 * len(items))(*strides),
        )
        self._x, self._g = _pointers(xs), _pointers([item.g for item in items])

    def take(self, items: Sequence[Item]) -> None:
        """Be told where the gradients of this step are."""
        self._g = _pointers([item.g for item in items])

    def finite(self) -> bool:
        """Whether the gradients are."""
        return _checked(self._probe(*self._head, self._g, torch.get_num_threads())) == 0

    def step(self, numbers: npt.NDArray[np.float64], out: npt.NDArray[np.float64]) -> None:
        """Take a step, with the gradients that `take` was told of.

        Args:
            numbers: The coefficients, a column for each tensor.
            out: Two sums for each tensor, which are added to.
        """
        tables = ctypes.c_void_p(numbers.ctypes.data), ctypes.c_void_p(out.ctypes.data)
        threads = torch.get_num_threads()
        _checked(self._step(*self._head, self._x, self._g, *self._tail, *tables, threads))


def _suits_native(bundle: Bundle) -> bool:
    """Whether native passes can take tensors of this kind, and nobody looks on."""
    return (
        bundle.device.type == "cpu"
        and bundle.items[0].x.dtype in _NATIVE_NAMES
        and not torch._C._len_torch_dispatch_stack()
    )


def suits_untuned(item: Item) -> bool:
    """Whether the native pass of `Untuned` can take a tensor."""
    x, g, buffers, _ = item
    return (
        NATIVE is not None
        and x.device.type == "cpu"
        and x.dtype in _NATIVE_NAMES
        and buffers[0].dtype == buffers[1].dtype
        and buffers[0].dtype in _NATIVE_STATES[x.dtype]
        and g is not None
        and g.dtype == x.dtype
        and flat_views(x, g, *buffers[:2], *buffers[3:]) is not None
        and not torch._C._len_torch_dispatch_stack()
    )


class _Places:
    """Where tensors lie in memory, as the library wants to be told; nothing of them is held.

    Args:
        xs: The parameters.
        ds: Their estimators.
    """

    def __init__(self, xs: list[Tensor], ds: list[Tensor]) -> None:
        self.dtype = xs[0].dtype if xs else None
        self.head = ctypes.c_int64(len(xs)), (ctypes.c_int64 * len(xs))(*[x.numel() for x in xs])
        self.x, self.d = _pointers(xs), _pointers(ds)


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _laid_out_alike(bundle: Bundle) -> tuple[_Places, list[Item], Bundle | None]:
    """Where those tensors lie that are laid out alike, these, and the rest, if there is one."""
    if known := bundle.lists.get("native"):
        return known, bundle.items, None
    alike = list(map(_alike, bundle.items))
    taken = [item for item, fits in zip(bundle.items, alike) if fits]
    places = _Places([item.x for item in taken], [item.buffers[0] for item in taken])
    if all(alike):
        bundle.lists["native"] = places
        return places, taken, None
    rest = [item for item, fits in zip(bundle.items, alike) if not fits]
    return places, taken, bundle.with_items(rest)


def _alike(item: Item) -> bool:
    x, g, buffers, _ = item
    if g is not None and g.dtype != x.dtype:
        return False
    if (buffers[0].dtype, buffers[0].device) != (wide_dtype(x.dtype), x.device):
        return False
    tensors = (x, *buffers) if g is None else (x, g, *buffers)
    if any(t.shape != x.shape for t in tensors):
        return False
    return all(t.is_contiguous() for t in tensors) or flat_views(*tensors) is not None


_LIBRARY = load_native()
PLAIN, FOREACH = Plain(), Foreach()
NATIVE = None if _LIBRARY is None else Native(_LIBRARY)
