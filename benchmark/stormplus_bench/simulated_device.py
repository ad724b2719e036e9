"""A simulated accelerator: tensors that report another device and keep their values on the CPU.

    with SimulatedDevice("cuda") as device:
        p = nn.Parameter(device.put(torch.ones(3)))
        ...
        device.reset()
        optimizer.step()
    assert device.counts.syncs == 0, device.where

The counts follow torch's CUDA code (ForeachUtils.h of 2.13, kernels of several 2.x), simplified:
- A call that computes is one launch, apart from the cases in `_events`.
- A multi-tensor call on the fast route is one launch. In a build for CUDA 13 that holds up to 210
  tensors and 2240 chunks of 65536 elements. Builds for older versions of CUDA start another launch
  after 30 to 110 tensors (the more lists, the fewer) or 320 chunks.
- A non-blocking copy never waits. In reality the driver waits if the host memory is pageable.
- Lists of multi-tensor calls are taken to be floating-point, and norms to be of order 1, 2 or inf.
- Random numbers come from the CPU's generator. Streams, events and graphs are not simulated.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, TypeGuard
from unittest import mock

import torch
import torch._dynamo  # a dispatch mode imports it, and it must not see the stand-ins of __enter__
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stormplus_bench.memory import take_step

Arguments: TypeAlias = dict[str, Any]  # of a call, by name
Events: TypeAlias = Mapping[str, int]  # how often a call launches, waits and copies

META = torch.device("meta")
NO_KERNEL = {"_unsafe_view", "is_pinned", "is_same_size", "record_stream"}
SYNCS = {"_unique", "_unique2", "bincount", "equal", "masked_select", "nonzero", "unique_dim"}
INDEXING = {"_index_put_impl_", "_unsafe_index", "index", "index_put", "index_put_"}
# Multi-tensor operations with three kernels: clear the partial results, reduce each chunk, reduce
# each tensor.
THREE_KERNELS = {"max", "norm", "powsum"}


class Counts(NamedTuple):
    launches: int  # includes copies within the device
    syncs: int  # calls that wait for the device; a blocking copy is one of them
    h2d: int
    d2h: int


class SimulatedTensor(Tensor):
    """A tensor on a SimulatedDevice; `on_cpu` is the CPU tensor with its values.

    To torch's C++ code it is a meta tensor: with another device, C++ would look for a driver.
    """

    on_cpu: Tensor
    owner: SimulatedDevice

    device = property(lambda self: self.owner.device)
    is_cuda = property(lambda self: self.device.type == "cuda")

    @staticmethod
    def __new__(cls: Any, inner: Tensor, owner: SimulatedDevice) -> SimulatedTensor:
        layout: Arguments = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        layout |= {"dtype": inner.dtype, "device": META}
        self: SimulatedTensor = Tensor._make_wrapper_subclass(cls, inner.shape, **layout)
        self.on_cpu, self.owner = inner, owner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Arguments | None = None
    ) -> Any:
        """Handle a call outside the `with` block."""
        owner = next(t.owner for t in tree_leaves((args, kwargs)) if on_device(t))
        return owner.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Arguments | None = None
    ) -> Any:
        if func in (Tensor.data_ptr, Tensor.untyped_storage):
            return func(value(args[0]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.on_cpu}, device='{self.device}')"


def on_device(tensor: Any) -> TypeGuard[SimulatedTensor]:
    return isinstance(tensor, SimulatedTensor)


def value(tensor: Tensor) -> Tensor:
    """Return the CPU tensor that holds the values of `tensor`."""
    return tensor.on_cpu if on_device(tensor) else tensor


class SimulatedDevice(TorchDispatchMode):
    """Count what torch asks of a device of this type: "cuda", "mps" or "xpu".

    With `float64=False`, raise TypeError when a call creates a float64 tensor on the device. Within
    the `with` block, a tensor created on "meta" is on this device too.
    """

    def __init__(self, type: str = "cuda", float64: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(type, 0)
        self.float64 = float64
        # By line of the library, operation and event.
        self.where: Counter[tuple[str, str, str]] = Counter()
        self._on_exit = ExitStack()

    @property
    def counts(self) -> Counts:
        events = ("launch", "sync", "h2d", "d2h")
        return Counts(*(sum(n for key, n in self.where.items() if key[2] == e) for e in events))

    def reset(self) -> None:
        self.where.clear()

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of a CPU tensor on the device. It is not counted."""
        return self._wrap("put", tensor.detach().clone(), {})

    def launch(self) -> None:
        """Count a launch that torch does not see, such as that of a Triton kernel."""
        self._record("custom kernel", {"launch": 1})

    def __enter__(self) -> SimulatedDevice:
        stand_ins = {
            "_lazy_init": lambda: None,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "is_current_stream_capturing": lambda: False,
            "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
            "synchronize": lambda *_: self._record("synchronize", {"sync": 1}),
        }
        for module in {torch.cuda, getattr(torch, self.device.type, torch.cuda)}:
            for name in stand_ins.keys() & vars(module).keys():
                patch = mock.patch.object(module, name, stand_ins[name])
                self._on_exit.enter_context(patch)
        self._on_exit.enter_context(_TranslateDevice(self.device))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._on_exit.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Arguments | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        device = kwargs.get("device")
        creates_here = device in (META, self.device)
        if not creates_here and not any(map(on_device, tensors)):
            return _run_on_host(func, name, args, kwargs)
        given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
        self._record(name, self._events(func, name, given, creates_here))
        kwargs.pop("pin_memory", None)
        if device is not None:
            kwargs["device"] = "cpu"
        result = func(*tree_map_only(Tensor, value, args), **tree_map_only(Tensor, value, kwargs))
        if name.startswith("_foreach_") and name.endswith("_"):  # the kernels do this, not autograd
            for t in given["self"]:
                if on_device(t):
                    torch.autograd.graph.increment_version(t)
        if device is not None and not creates_here:
            return result
        arguments = {id(value(t)): t for t in tensors}
        return tree_map_only(Tensor, lambda t: self._wrap(name, t, arguments), result)

    def _wrap(self, name: str, inner: Tensor, arguments: Mapping[int, Tensor]) -> Tensor:
        if id(inner) in arguments:  # a call that writes into an argument returns it
            return arguments[id(inner)]
        if not self.float64 and inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{name} at {_library_line()} creates {inner.dtype} on {self.device}")
        return SimulatedTensor(inner, self)

    def _record(self, name: str, events: Events) -> None:
        for event, n in events.items():
            if n:
                self.where[_library_line(), name, event] += n

    def _events(  # noqa: PLR0911
        self, func: Any, name: str, given: Arguments, creates_here: bool
    ) -> Events:
        """Return how often a call with the arguments `given` launches, waits and copies."""
        if func.is_view or name.startswith(("empty", "new_empty")) or name in NO_KERNEL:
            return {}
        if name == "_to_copy":
            to_device = creates_here or given.get("device") is None
            return _copy_events(to_device, given["self"], given.get("non_blocking"))
        if name == "copy_":
            return _copy_events(on_device(given["self"]), given["src"], given.get("non_blocking"))
        if given.get("device") is not None and not creates_here:  # zeros_like(t, device="cpu")
            return {}
        if name in INDEXING:
            return _indexing_events(given)
        if name != "_foreach_copy_" and not creates_here:
            _check_places(func, name, given)
        if name.startswith("_foreach_"):
            return self._foreach_events(name, given)
        if name == "_local_scalar_dense":
            return {"sync": 1}
        waits = (
            name in SYNCS
            or (name.startswith("masked_fill") and on_device(given["value"]))  # value.item()
            or (name == "repeat_interleave" and given.get("output_size") is None)
        )
        return {"launch": 1, "sync": int(waits)}

    def _foreach_events(self, name: str, given: Arguments) -> Events:
        operation = name.removeprefix("_foreach_").removesuffix("_")
        lists = [v for v in given.values() if isinstance(v, list) and isinstance(v[0], Tensor)]
        # torch has no multi-tensor kernels for MPS.
        if self.device.type != "mps" and _takes_fast_route(operation, lists, given):
            return {"launch": 3 if operation in THREE_KERNELS else 1}
        if operation != "copy":
            return {"launch": len(lists[0])}
        events: Counter[str] = Counter()
        for to, source in zip(*lists):
            events.update(_copy_events(on_device(to), source, given.get("non_blocking")))
        return events


def _check_places(func: Any, name: str, given: Arguments) -> None:
    """Raise, as torch does, unless tensors on the CPU are 0-dimensional and only read."""
    for argument in func._schema.arguments:
        tensors = [t for t in tree_leaves(given.get(argument.name)) if isinstance(t, Tensor)]
        if name.startswith("_foreach_addc") and argument.name == "scalars":
            misplaced = any(map(on_device, tensors))  # one number per tensor, read by the host
        else:
            written = argument.alias_info is not None and argument.alias_info.is_write
            misplaced = any(not on_device(t) and (written or t.dim() > 0) for t in tensors)
        if misplaced:
            raise RuntimeError(f"{name} at {_library_line()}: {argument.name} on the wrong device")


def _copy_events(to_device: bool, source: Any, non_blocking: bool | None) -> Events:
    if to_device and on_device(source):
        return {"launch": 1}
    return {"h2d" if to_device else "d2h": 1, "sync": 0 if non_blocking else 1}


def _indexing_events(given: Arguments) -> Events:
    """Count a nonzero() per mask and a copy per index on the host."""
    indices = [i for i in given["indices"] if i is not None]
    masks = sum(on_device(i) and i.dtype in (torch.bool, torch.uint8) for i in indices)
    copies = sum(not on_device(i) for i in indices)
    return {"launch": 1 + masks, "sync": masks + copies, "h2d": copies}


def _takes_fast_route(operation: str, lists: list[list[Any]], given: Arguments) -> bool:
    """Mirror can_use_fast_route in ATen/native/ForeachUtils.h and what its callers add to it."""
    if not all(on_device(t) and _is_dense(t.on_cpu) for members in lists for t in members):
        return False
    dtypes = [{t.dtype for t in members} for members in lists]
    if max(map(len, dtypes)) > 1 or (operation != "copy" and len(set.union(*dtypes)) > 1):
        return False
    if not all(_same_layout(*pair) for others in lists[1:] for pair in zip(lists[0], others)):
        return False
    # A tensor operand must have the same dtype. One on the CPU becomes a number.
    return all(t.dtype == lists[0][0].dtype for t in given.values() if on_device(t))


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a block of memory. Only then, empty_like keeps strides."""
    return torch.empty_like(tensor, device=META).stride() == tensor.stride()


def _same_layout(a: Tensor, b: Tensor) -> bool:
    strides = zip(a.shape, a.stride(), b.stride())
    return a.shape == b.shape and all(size == 1 or s == t for size, s, t in strides)


def _run_on_host(func: Any, name: str, args: Sequence[Any], kwargs: Arguments) -> Any:
    """Run a call that does not concern the device, and pretend to pin memory."""
    pin = kwargs.pop("pin_memory", None) or name == "_pin_memory"
    if name == "is_pinned":
        return getattr(args[0], "pretends_to_be_pinned", False)
    result = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
    if pin:
        result.pretends_to_be_pinned = True
    return result


def _library_line() -> str:
    """Return the file and line of the innermost frame in the library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/stormplus/" in file and file != __file__:
            return f"{file.rpartition('/stormplus/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside stormplus"


class _TranslateDevice(TorchFunctionMode):
    """Replace the simulated device by "meta" in the arguments of torch's functions."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Arguments | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to:
            args = [META if self._is_simulated(a) else a for a in args]
        if self._is_simulated(kwargs.get("device")):
            kwargs["device"] = META
        if func in (torch.tensor, torch.as_tensor):
            kwargs.pop("pin_memory", None)
            if kwargs.get("device") == META:  # which would discard the values
                requires_grad = kwargs.pop("requires_grad", False)
                tensor = func(*args, **kwargs | {"device": "cpu"})
                return tensor.to(META).requires_grad_(requires_grad)
        return func(*args, **kwargs)

    def _is_simulated(self, device: Any) -> bool:
        is_device = isinstance(device, (str, torch.device))
        return is_device and torch.device(device).type == self.device.type


def device_counts(
    make: Callable[[list[nn.Parameter]], Optimizer],
    shapes: Iterable[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
) -> Counts:
    """Return the counts of the third step; for a paired optimizer, of both halves.

    Triton kernels are not simulated: the counts are those of the portable backend.
    """
    with SimulatedDevice() as simulated:
        zeros = [torch.zeros(*shape, dtype=dtype, device="cpu") for shape in shapes]
        params = [nn.Parameter(simulated.put(t)) for t in zeros]
        for p, t in zip(params, zeros):
            p.grad = simulated.put(t)
        opt = make(params)
        for _ in range(3):  # the first two make state and upload tables
            simulated.reset()
            take_step(opt)
        return simulated.counts
