"""What a step works on: `TensorGroup` has the tensors, `ScalarTable` the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stormplus.torch._sharding import ProcessGroups, SampledCoordinates, as_tensor

State: TypeAlias = dict[str, Any]
Number: TypeAlias = float | Tensor  # 0-dim where reading it would wait for the device
Numbers: TypeAlias = Any  # an array, or a tensor on a device, with one entry per tensor

_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_ACCUMULATORS: dict[torch.device, torch.dtype] = {}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision: in bf16 1 - 1e-3 is 1, and d would never decay."""
    return _WIDE.get(dtype, dtype)


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return float64 if the device has it, else float32, which `rules.Sum` compensates."""
    if device not in _ACCUMULATORS:
        try:
            torch.zeros(1, dtype=torch.float64, device=device).add_(1)
            _ACCUMULATORS[device] = torch.float64
        except (TypeError, RuntimeError):
            _ACCUMULATORS[device] = torch.float32
    return _ACCUMULATORS[device]


@dataclass(slots=True)
class TensorGroup:
    """Tensors that one pass handles together: same options, device, dtypes and process groups.

    The lists have one entry per parameter: its part on this process, complex as pairs of reals.
    """

    param_group: dict[str, Any]  # Untuned has options per tensor instead
    kernels: ModuleType  # the backend
    device: torch.device
    process_groups: ProcessGroups = ()  # over which norms are summed
    is_new: bool = False  # whether this is their first gradient
    indices: list[int] = field(default_factory=list)  # their places among all parameters
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)  # local buffers by name
    # PairedOptimizer
    sign: float = 1.0  # -1 to maximize
    l2: float = 0.0  # weight decay as part of the objective
    estimators: list[Tensor] = field(default_factory=list)
    # Untuned
    z_minus_x: list[Tensor] = field(default_factory=list)
    grad_rms: list[Tensor] = field(default_factory=list)
    initial_sample: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)  # empty unless in half precision
    coordinates: list[SampledCoordinates] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ParamInfo:
    """A parameter, and what the optimizer knows about it besides its state."""

    p: Tensor
    param_group: dict[str, Any]
    state: State
    index: int  # its place among all parameters
    process_groups: ProcessGroups
    layout: Any = None  # device, dtype, shape and strides for which its buffers were made
    coordinates: Any = None  # `SampledCoordinates`, if the optimizer has numbers per tensor
    key: Any = None  # layouts of parameter and gradient for which the rest was chosen
    kernels: ModuleType | None = None  # None if it has no elements
    group_key: int = 0  # the same for parameters that one pass may handle together
    is_ordinary: bool = True  # contiguous and real, of type Tensor or Parameter
    left_out: bool = False  # whether it is frozen, and was when the last step was taken
    average_version: int | None = None  # its version counter where `Untuned.eval()` has left it


def layout(p: Tensor) -> tuple[Any, ...]:
    """Return what the buffers of a parameter follow."""
    return p.device, p.dtype, p.shape, p.is_contiguous() or p.stride()


class BufferKind(NamedTuple):
    """What kind of tensor a parameter has in its state."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None  # None: sharded and laid out as the parameter

    def shape_for(self, p: Tensor) -> tuple[int, ...]:
        return p.shape if self.shape is None else self.shape

    def placed(self, p: Tensor, buffer: Tensor | None) -> Tensor:
        """Return a new buffer of p, or one that follows p's device, dtype and layout."""
        if buffer is None and self.shape is None:
            return torch.zeros_like(p, dtype=self.dtype, requires_grad=False)
        if buffer is None:
            return torch.zeros(self.shape_for(p), dtype=self.dtype, device=p.device)
        if buffer.shape != self.shape_for(p):
            return buffer  # a frozen parameter may be emptied
        if self.shape is None and buffer.stride() != p.stride():
            like = torch.empty_like(p, dtype=self.dtype, requires_grad=False)
            if buffer.stride() != like.stride():  # those of p may have gaps
                return like.copy_(buffer)
        return buffer.to(p.device, self.dtype)


class ScalarTable:
    """Named rows of numbers, one column per owner, on the parameters' device.

    Each owner's dictionary gets its numbers by name, as views of the table, which keeps its
    address: a captured CUDA graph stays valid. Numbers that it has already are kept.

    Attributes:
        tensor: The table.
        on_host: Whether numbers can be read without waiting for a device.
        xp: The library of the rows, numpy or torch.
        rows: By name: tensors on a device; on the CPU NumPy views, on which arithmetic with a few
            numbers is several times as fast.
    """

    def __init__(
        self, initial: Mapping[str, float], owners: Sequence[State], device: torch.device
    ) -> None:
        dtype = accumulator_dtype(device)
        column = torch.tensor(list(initial.values()), dtype=dtype, device=device)
        self.names, self.width = tuple(initial), len(owners)
        self.tensor = column.unsqueeze(1).repeat(1, len(owners))
        for name, row in zip(initial, self.tensor.unbind()):
            for owner, number in zip(owners, row.unbind()):
                if name in owner:
                    number.copy_(owner[name])
                owner[name] = number
        self.bind(on_host=device.type == "cpu" and not torch.compiler.is_compiling())

    def bind(self, *, on_host: bool) -> None:
        """Set where the arithmetic is done; again if the table's memory has moved."""
        self.on_host, self.address = on_host, self.tensor.data_ptr() if on_host else 0
        self.xp: ModuleType = np if on_host else torch
        rows = self.tensor.numpy() if on_host else self.tensor.unbind()
        self.rows: dict[str, Numbers] = dict(zip(self.names, rows))
        self.cache: dict[Any, Any] = {}  # what a step would have to upload again

    def write(self, values: Mapping[str, Numbers], mask: Any = None) -> None:
        """Write some rows in place; with a mask, only some columns."""
        rows = self.rows
        if not self.on_host:
            new = [values.get(k, row).to(row.dtype).expand_as(row) for k, row in rows.items()]
            table = torch.stack(new)
            self.tensor.copy_(table if mask is None else torch.where(mask, table, self.tensor))
            return
        for name, value in values.items():
            if mask is None:
                rows[name][:] = value
            else:
                np.copyto(rows[name], value, where=mask)

    def upload(self, *arrays: Any) -> Sequence[Numbers]:
        """Return NumPy arrays on the table's device, for `cache`."""
        if len(self.cache) > 64:
            self.cache.clear()
        if self.on_host:
            return arrays
        tensors = [torch.from_numpy(array) for array in arrays]
        tensors = [t.to(self.tensor.dtype) if t.is_floating_point() else t for t in tensors]
        return [t.to(self.tensor.device, non_blocking=True) for t in tensors]

    def select(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Return some owners as an index and as a mask; (slice(None), None) for all."""
        if len(indices) == self.width:
            return slice(None), None
        key = tuple(indices)
        if key not in self.cache:
            mask = np.isin(range(self.width), indices)
            self.cache[key] = self.upload(np.array(indices), mask)
        index, mask = self.cache[key]
        return index, mask

    def scatter(self, numbers: Any, indices: Sequence[int]) -> Numbers:
        """Return full rows, with the numbers of some owners and zeros for the others."""
        index, mask = self.select(indices)
        rows: Numbers = np.asarray(numbers) if self.on_host else as_tensor(numbers, self.tensor)
        if mask is None:
            return rows
        shape = len(rows), len(mask)
        full = np.zeros(shape) if self.on_host else self.tensor.new_zeros(shape)
        full[:, index] = rows
        return full

    def snapshot(self) -> list[State]:
        """Return the numbers of each owner by name, as tensors of their own on the CPU."""
        columns = self.tensor.detach().cpu().unbind(1)
        return [{k: v.clone() for k, v in zip(self.names, column)} for column in columns]
