"""Lists of tensors for a backend, its passes on copies of them, and what they must agree with."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from stormplus.torch._sharding import SampledCoordinates, memory_order
from stormplus.torch._tensors import TensorGroup, wide_dtype
from stormplus.torch.kernels import native, plain, triton
from stormplus.torch.kernels.plain import UntunedCoefficients

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Kind:
    """A kind of tensors; the gradients are of the order of `scale`."""

    dtype: torch.dtype = F32
    state_dtype: torch.dtype | None = None  # of the buffers of Untuned; None: the wide dtype
    grad_dtype: torch.dtype | None = None  # None: the dtype
    shapes: tuple = ((), (1,), (5,), (1023,), (1025,), (200, 200))
    scale: float = 1.0
    layout: str = "contiguous"
    without: tuple = ()  # the backends that do not support it
    entry: tuple | None = None  # a list, and one number in its last tensor
    is_part: bool = False  # whether only some sampled coordinates are here

    def draw(self, seed, dtype, scale=1.0):
        """Return a list of tensors."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(s, generator=generator, dtype=F64) for s in self.shapes]
        return [in_memory_order(LAYOUTS[self.layout]((scale * t).to(dtype))) for t in drawn]

    def pair(self):
        lists = {
            "params": self.draw(1, self.dtype),
            "grads": self.draw(2, self.grad_dtype or self.dtype, self.scale),
            "estimators": self.draw(3, wide_dtype(self.dtype), self.scale),
        }
        self.set_entry(lists)
        return lists

    def set_entry(self, lists):
        if self.entry is not None:
            name, value = self.entry
            lists[name][-1][3, 3] = value

    def coordinates(self, tensors):
        coordinates = [SampledCoordinates.of(t) for t in tensors]
        if self.is_part:
            for sampled in coordinates:
                places = torch.randperm(sampled.count, generator=torch.Generator().manual_seed(5))
                sampled.index = sampled.index[::3].contiguous()
                sampled.count_here = len(sampled.index)
                sampled.in_whole = places[: sampled.count_here]
                sampled.stride = 0
        return coordinates

    def untuned(self):
        wide = wide_dtype(self.dtype)
        state_dtype = self.state_dtype or wide
        exact = self.draw(1, wide)
        coordinates = self.coordinates(exact)
        lists = {
            "params": [t.to(self.dtype) for t in exact],
            "grads": self.draw(2, self.grad_dtype or self.dtype, self.scale),
            "z_minus_x": self.draw(3, state_dtype, 0.01),
            "grad_rms": [t.abs() for t in self.draw(4, state_dtype, self.scale)],
            "initial_sample": [torch.linspace(-1, 1, s.count, dtype=wide) for s in coordinates],
            "masters": exact if wide != self.dtype else [],
            "coordinates": coordinates,
        }
        self.set_entry(lists)
        if lists["masters"]:
            lists["params"][-1].view(-1)[7] = 3.0  # written to by the user
        return lists


def in_memory_order(t):
    """As the optimizers pass tensors to a backend: contiguous unless they have gaps."""
    return t.permute(memory_order(t))


LAYOUTS = {
    "contiguous": lambda t: t,
    "unaligned": lambda t: torch.cat([t.view(-1)[:1], t.view(-1)])[1:].view(t.shape),
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.t().contiguous().t(),
    "gaps": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}
IMAGES = ((3, 4, 5, 5), (40, 7, 3, 3))
KINDS = {
    "float32": Kind(),
    "float64": Kind(F64, without=(triton,)),
    "bfloat16": Kind(BF16),
    "float16": Kind(F16),
    "gradients in bfloat16": Kind(grad_dtype=BF16, without=(native,)),
    "bfloat16, gradients in float32": Kind(BF16, grad_dtype=F32, without=(native,)),
    "zeros": Kind(scale=0.0),
    "1e-20": Kind(scale=1e-20),
    "1e20": Kind(scale=1e20),
    "1e-200": Kind(F64, scale=1e-200, without=(triton,)),
    "1e200": Kind(F64, scale=1e200, without=(triton,)),
    "unaligned": Kind(layout="unaligned"),
    "channels last": Kind(shapes=IMAGES, layout="channels last"),
    "transposed": Kind(shapes=((7, 300), (40, 50)), layout="transposed"),
    "gaps": Kind(layout="gaps", without=(native, triton)),
}
UNTUNED_KINDS = KINDS | {
    "bfloat16 state": Kind(state_dtype=BF16),
    "bfloat16, bfloat16 state": Kind(BF16, state_dtype=BF16),
    "float16, bfloat16 state": Kind(F16, state_dtype=BF16),
    "channels last, bfloat16 state": Kind(shapes=IMAGES, layout="channels last", state_dtype=BF16),
    "gaps, bfloat16 state": Kind(layout="gaps", state_dtype=BF16, without=(native, triton)),
    "part of a sample": Kind(is_part=True),
}


def copied(value):
    if not isinstance(value, torch.Tensor):
        return value
    start = value.storage_offset()
    size = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride()))
    memory = torch.empty(start + size, dtype=value.dtype)
    return memory.as_strided(value.shape, value.stride(), start).copy_(value)


def group_of(backend, lists, sign=1.0, l2=0.0):
    """Return a group of copies, with the same strides and alignment."""
    copies = {name: [copied(value) for value in values] for name, values in lists.items()}
    return TensorGroup({}, backend, torch.device("cpu"), sign=sign, l2=l2, **copies)


def tensors_of(group, lists):
    return {name: getattr(group, name) for name in lists if name != "coordinates"}


def as_number(backend, x):
    return np.float64(x) if backend in (native, plain) else torch.tensor(x, dtype=F64)


def moved(backend, lists, skip=None, **options):
    group = group_of(backend, lists, **options)
    backend.move(group, as_number(backend, 0.37), skip)
    return tensors_of(group, lists), []


def estimated(backend, lists, finite_only=True, skip=None, **options):
    group = group_of(backend, lists, **options)
    one_minus_a = as_number(backend, 0.63)
    sums = backend.estimate(group, one_minus_a, finite_only=finite_only, skip=skip)
    return tensors_of(group, lists), [float(s) for s in sums]


def untuned(backend, lists, skip=None):
    """Take a step with coefficients that differ from tensor to tensor."""
    group = group_of(backend, lists)
    i = np.arange(len(group.params), dtype=np.float64)
    t = 1 + 3 * i
    coefficients = UntunedCoefficients(
        alpha=0.01 + 0.01 * i,
        max_move=0.03 + 0 * i,
        decay=np.where(i % 3 == 1, 0.1, 0.0),
        grad_weight=3 / (t + 2),
        average_weight=9 / (t + 8),
        grad_factor=np.where(i % 2 == 0, 1.0, -0.25),
        step=t,
    )
    if backend not in (native, plain):
        coefficients = UntunedCoefficients(*map(torch.from_numpy, coefficients))
    u_sq, displacement_sq = backend.untuned_step(group, coefficients, skip)
    return tensors_of(group, lists), np.array([np.asarray(u_sq), np.asarray(displacement_sq)])


def assert_tensors_agree(actual, expected, exact=False):
    """Up to some roundings of the largest number in a tensor, or to the last bit."""
    if exact:
        return torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    for name in expected:
        for a, b in zip(actual[name], expected[name], strict=True):
            eps, wide_eps = torch.finfo(a.dtype).eps, torch.finfo(wide_dtype(a.dtype)).eps
            largest = float(b.abs().nan_to_num(0, 0, 0).max())
            torch.testing.assert_close(
                a, b, rtol=eps, atol=4 * wide_eps * largest, equal_nan=True, msg=name
            )
            # In half precision few numbers are so close to the middle that they round differently.
            assert (a == b).double().mean() > 0.99 or eps == wide_eps, name


OBJECTIVES = {
    "bare": {},
    "L2": {"l2": 0.1},
    "maximize": {"sign": -1.0, "l2": 0.1},
}
NONFINITE = [math.nan, -math.inf]


@dataclass(frozen=True)
class Case:
    """A pass, and what it runs on."""

    run: Callable
    kind: Kind
    options: dict

    def lists(self):
        return self.kind.untuned() if self.run is untuned else self.kind.pair()


def cases():
    """Return all passes that must equal the plain one."""
    rows = [(run, name, kind, {}) for name, kind in KINDS.items() for run in (moved, estimated)]
    rows += [(untuned, name, kind, {}) for name, kind in UNTUNED_KINDS.items()]
    for name, options in OBJECTIVES.items():
        rows += [(run, name, Kind(BF16), options) for run in (moved, estimated)]
    for dtype, value in zip((F32, F16), NONFINITE):
        for only in (True, False):
            kind = Kind(dtype, entry=("grads", value))
            rows.append((estimated, f"{value}, {only}", kind, {"finite_only": only}))
    for dtype, value in product((F32, BF16), NONFINITE):
        kind = Kind(state_dtype=dtype, entry=("grads", value))
        rows.append((untuned, f"{value}, {dtype} state", kind, {}))
    return {f"{run.__name__}, {name}": Case(run, *rest) for run, name, *rest in rows}
