"""What a step works on: `TensorGroup`, `ScalarTable`, and names for parameters in messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stormplus.torch._sharding import ProcessGroups, Sample, local

State: TypeAlias = dict[str, Any]
Number: TypeAlias = Any  # a float; a 0-dim tensor where reading it would wait for the device
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


class Objective(NamedTuple):
    """What is minimized; native.c has a struct with these fields."""

    sign: float  # -1 to maximize
    l2: float  # weight decay as part of the objective


_MINIMIZE = Objective(sign=1.0, l2=0.0)
_LISTS = (
    *("columns", "params", "grads", "estimators"),
    *("z_minus_x", "grad_rms", "initial_sample", "masters", "samples"),
)


@dataclass(slots=True)
class TensorGroup:
    """Tensors that one pass handles together: same options, device, dtypes and process groups.

    The lists have one entry per parameter: its part on this process, complex as pairs of reals.
    """

    options: dict[str, Any]  # the parameter group; Untuned has options per tensor instead
    kernels: ModuleType  # the backend
    device: torch.device
    process_groups: ProcessGroups = ()  # over which norms are summed
    first: bool = False  # whether this is their first gradient
    columns: list[int] = field(default_factory=list)  # their places among all parameters
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    # PairedOptimizer
    objective: Objective = _MINIMIZE
    estimators: list[Tensor] = field(default_factory=list)
    # Untuned
    z_minus_x: list[Tensor] = field(default_factory=list)
    grad_rms: list[Tensor] = field(default_factory=list)
    initial_sample: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)  # empty unless in half precision
    samples: list[Sample] = field(default_factory=list)
    native_table: bytes | None = None  # kept by native.py between its check and its pass

    def slice(self, start: int, end: int) -> TensorGroup:
        """Return a group with some of the tensors."""
        part = TensorGroup(self.options, self.kernels, self.device, self.process_groups, self.first)
        part.objective = self.objective
        for name in _LISTS:
            setattr(part, name, getattr(self, name)[start:end])
        return part


@dataclass(slots=True)
class ParamInfo:
    """A parameter, and what the optimizer knows about it besides its state."""

    p: Tensor
    options: dict[str, Any]  # its parameter group
    state: State
    column: int  # its place among all parameters
    process_groups: ProcessGroups
    layout: Any = None  # for which the buffers were made
    sample: Sample | None = None
    kernels: ModuleType | None = None  # None if it has no elements
    kernels_key: Any = None  # for which the kernels were chosen
    group_key: int = 0  # the same for parameters that one pass may handle together
    plain: bool = True  # neither sharded, nor complex, nor another subclass of Tensor


# A parameter that takes part in a pass, its backend, its local part and gradient, and its buffers.
Participant: TypeAlias = tuple[ParamInfo, ModuleType, Tensor, Tensor, State]


class ScalarTable:
    """Named rows of numbers, one column per owner, on the parameters' device.

    Each owner's dictionary gets its numbers by name, as views of the table, which keeps its
    address: a captured CUDA graph stays valid. On the CPU arithmetic uses NumPy views of the rows,
    which is several times as fast on a few numbers.

    Args:
        initial: The names, and the values before the first step.
        owners: The dictionaries; numbers that they have already are kept.
        device: Where the table is.

    Attributes:
        tensor: The table.
        on_host: Whether numbers can be read without waiting for a device.
        table: The same as a NumPy array on the CPU, as a tuple of rows elsewhere.
        rows: By name: NumPy views on the CPU, tensors elsewhere.
        where: Of the library that the rows belong to.
    """

    def __init__(
        self, initial: Mapping[str, float], owners: Sequence[State], device: torch.device
    ) -> None:
        dtype = accumulator_dtype(device)
        rows = []
        for name, value in initial.items():
            fresh = torch.full((), value, dtype=dtype, device=device)
            known = [owner.get(name, fresh).to(device, dtype).reshape(()) for owner in owners]
            rows.append(torch.stack(known))
        # A table without rows is that of an optimizer without numbers per tensor.
        shape = len(initial), len(owners)
        self.tensor = torch.stack(rows) if rows else torch.zeros(shape, device=device)
        self.names, self._initial = tuple(initial), initial
        # A FakeTensor on the CPU has no values.
        self.has_values = device.type == "cpu" and type(self.tensor) is Tensor
        self._selections: dict[Any, Any] = {}
        for name, row in zip(initial, self.tensor.unbind()):
            for owner, number in zip(owners, row.unbind()):
                owner[name] = number
        self.bind()

    def bind(self) -> None:
        """Decide where the arithmetic is done."""
        self.on_host = self.has_values and not torch.compiler.is_compiling()
        self.address = self.tensor.data_ptr() if self.on_host else 0
        self.table: Any = self.tensor.numpy() if self.on_host else self.tensor.unbind()
        self.rows: dict[str, Numbers] = dict(zip(self.names, self.table))

    def add(self, name: str, value: Any) -> None:
        """Add to a row in place."""
        self.rows[name] += value

    def write(self, values: Mapping[str, Numbers], mask: Any = None) -> None:
        """Write some rows in place; with a mask, only some columns."""
        if not self.on_host:
            table = self.stacked(values)
            self.tensor.copy_(table if mask is None else torch.where(mask, table, self.tensor))
            return
        for name, value in values.items():
            if mask is None:
                self.rows[name][...] = value
            else:
                np.copyto(self.rows[name], value, where=mask)

    def write_if_finite(
        self, values: Mapping[str, Numbers], instead: Mapping[str, Numbers], skip: Any
    ) -> Tensor:
        """Write rows of a table on a device, or others if a value is not finite; nothing if `skip`.

        Returns:
            Whether all values are finite, on the device.
        """
        table = self.stacked(values)
        finite = (table - table == 0).all()
        table = torch.where(finite, table, self.stacked(instead))
        self.tensor.copy_(table if skip is None else torch.where(skip, self.tensor, table))
        return finite

    def stacked(self, values: Mapping[str, Numbers]) -> Tensor:
        """Return what the table on a device would be with some rows written."""
        rows = self.rows.items()
        return torch.stack([values.get(k, row).to(row.dtype).expand_as(row) for k, row in rows])

    def array(self, values: Any) -> Numbers:
        """Return a NumPy array as it is on the CPU, as a tensor on a device."""
        if self.on_host:
            return values
        tensor = torch.from_numpy(values)
        dtype = self.tensor.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(dtype).to(self.tensor.device, non_blocking=True)

    def index(self, columns: Sequence[int]) -> Any:
        """Return what selects some columns of a row."""
        if len(columns) == self.tensor.shape[1]:
            return slice(None)
        return self._selection("index", columns, lambda: np.array(columns))

    def mask(self, columns: Sequence[int]) -> Any:
        """Return the mask of some columns; None for all."""
        width = self.tensor.shape[1]
        if len(columns) == width:
            return None
        return self._selection("mask", columns, lambda: np.isin(np.arange(width), columns))

    def _selection(self, kind: str, columns: Sequence[int], make: Callable[[], Any]) -> Any:
        key = kind, self.on_host, tuple(columns)
        if key not in self._selections:
            if len(self._selections) > 64:
                self._selections.clear()
            self._selections[key] = self.array(make())
        return self._selections[key]

    def spread(self, rows: Sequence[Numbers], columns: Sequence[int]) -> Numbers:
        """Return full rows, with numbers in some columns and zeros in the others."""
        whole, shape = len(columns) == self.tensor.shape[1], (len(rows), self.tensor.shape[1])
        if self.on_host:
            numbers = np.asarray(rows)
            if not whole:
                numbers, some = np.zeros(shape), numbers
                numbers[:, self.index(columns)] = some
            return numbers
        like = self.tensor
        table = torch.stack([torch.as_tensor(row).to(like, non_blocking=True) for row in rows])
        return table if whole else like.new_zeros(shape).index_copy_(1, self.index(columns), table)

    def reset_column(self, column: int) -> None:
        """Set one owner's numbers to their initial values."""
        for row, value in zip(self.tensor.unbind(), self._initial.values()):
            row[column] = value

    def snapshot(self) -> list[State]:
        """Return the numbers of each owner by name, as tensors of their own on the CPU."""
        columns = self.tensor.detach().cpu().unbind(1)
        return [{k: v.clone() for k, v in zip(self.names, column)} for column in columns]


def all_parameters(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Return all parameters, in the order of the groups."""
    return [p for group in groups for p in group["params"]]


def parameter_name(groups: list[dict[str, Any]], p: Tensor) -> str:
    """Return how to call a parameter in a message."""
    for i, group in enumerate(groups):
        for j, q in enumerate(group["params"]):
            if q is p:
                where = f"parameter {j} of group {i}"
                named = group.get("param_names")
                if named and len(named) == len(group["params"]):  # else it was edited by hand
                    return f"{where} ('{named[j]}')"
                return f"{where}, shape {tuple(p.shape)}"
    raise KeyError("not a parameter of this optimizer")


def describe_nonfinite(groups: list[dict[str, Any]]) -> str:
    """Return which gradient is not finite, by name."""
    for p in all_parameters(groups):
        if p.requires_grad and p.grad is not None:
            g = local(p.grad).to(accumulator_dtype(p.grad.device))
            if not bool(torch.isfinite(torch.linalg.vector_norm(g) ** 2)):
                name = parameter_name(groups, p)
                return f"the squared norm of the gradient of {name} is not finite"
    return (
        "a squared norm or a sum of them is not finite: of a gradient on another process, of a "
        "parameter under weight decay, or of the estimator"
    )


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a warning shows the user's line."""
    level, frame = 1, sys._getframe(1)
    inside = ("stormplus", "torch")
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level
