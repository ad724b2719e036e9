"""What all optimizers share: parameter groups, state, checkpoints and pass hooks; no step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stormplus.torch import _checkpoint
from stormplus.torch._checks import check_group, describe_nonfinite, reject_gradient
from stormplus.torch._sharding import (
    ProcessGroups,
    SampledCoordinates,
    local_tensors,
    norm_groups,
    sum_over_processes,
)
from stormplus.torch._tensors import BufferKind, ParamInfo, ScalarTable, State, TensorGroup, layout
from stormplus.torch.kernels import choose_kernels, plain
from stormplus.versions import split_named_parameters

NOTHING_MOVED = "nothing has moved: go on with another sample"
_ORDINARY_TYPES = (Tensor, nn.Parameter)  # neither sharded nor another subclass


class BaseOptimizer(Optimizer, ABC):
    """Base of all optimizers: state exists from construction and survives saving and loading.

    `state[p]` has the parameter's buffers and `initialized`: whether it has had a gradient. Numbers
    that all parameters share are in a dictionary, `scalars`, in the state of the last trainable
    parameter: torch's distributed checkpoint leaves out frozen ones. `generation` counts loads and
    resets.

    `_rebuild` makes state and tables, also when `_refresh` notices that parameters have come or
    gone. Every pass begins with `_collect`, which sorts the parameters into `TensorGroup`s.
    """

    _shared_initial: ClassVar[Mapping[str, float]]  # what all parameters share, initially
    _tensor_initial: ClassVar[Mapping[str, float]] = {}  # what each parameter has, initially
    _buffer_names: ClassVar[tuple[str, ...]]  # what `_buffers` may return
    _copied_names: ClassVar[tuple[str, ...]]  # attributes that pickle and deepcopy keep
    _shared_table: ScalarTable
    _tensor_table: ScalarTable
    _trainer_checked = False
    _skips_reported = 0.0
    _skips_on_host: Tensor | None = None  # how many steps a device has skipped, one step late

    def __init__(self, params: Any, defaults: dict[str, Any], *, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._infos: list[ParamInfo] = []  # empty during construction
        self._pass_hooks: OrderedDict[int, Callable[[Any, str], Any]] = OrderedDict()
        self.generation = 0
        super().__init__(params, defaults)
        if not self.parameters():
            raise ValueError("the optimizer got parameter groups with no parameter in them")
        self._rebuild()

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the options that a checkpoint must match, by name."""

    @abstractmethod
    def _initial_flags(self) -> State:
        """Return the integers in `scalars` before the first step."""

    @abstractmethod
    def _buffers(self, p: Tensor) -> dict[str, BufferKind]:
        """Return which buffers a parameter has."""

    def _check_added(self, group: dict[str, Any]) -> None:
        """Raise or warn if a parameter group that is added makes no sense to the subclass."""

    def _check_loaded(self, state_dict: State) -> None:
        """Raise if a saved state cannot be loaded, for a reason of the subclass."""

    def parameters(self) -> list[Tensor]:
        """Return all parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def grad_evaluations(self) -> int:
        """How many gradients have been used. Reading it waits for the device."""
        return int(self._shared_state["grad_evaluations"])

    @property
    def skipped(self) -> int:
        """How many samples were not finite on a device. Reading it waits for the device."""
        return int(self._shared_state["skipped"])

    def register_pass_hook(self, hook: Callable[[Any, str], Any]) -> RemovableHandle:
        """Call `hook(opt, event)` around each pass, until `handle.remove()` of what this returns.

        The class documents its events. Copies of the optimizer have no hooks.
        """
        handle = RemovableHandle(self._pass_hooks)
        self._pass_hooks[handle.id] = hook
        return handle

    def _notify(self, event: str) -> None:
        for hook in tuple(self._pass_hooks.values()):
            hook(self, event)

    # -- sums over tensors and processes, and numbers that are not finite ------------------------

    def _total(self, parts: list[tuple[ProcessGroups, Any]], *, agree: bool = False) -> Any:
        """Add up the numbers of groups of tensors, each over its process groups, on every rank.

        With `agree`, average over replicas too: a NaN on one of them is then a NaN on all.
        """
        on_host = self._shared_table.on_host
        if on_host and not self._mesh_groups:
            numbers = [np.asarray(numbers) for _, numbers in parts]
            return numbers[0] if len(numbers) == 1 else np.sum(numbers, axis=0)
        groups = self._mesh_groups if agree else self._shard_groups
        total = sum_over_processes(parts, groups, like=self._shared_table.tensor)
        return total.numpy() if on_host else total

    def _raise_if_skipped(self) -> None:
        """Raise if a device has skipped a step since the last call; it does not wait for it."""
        if self._skips_on_host is not None and float(self._skips_on_host) > self._skips_reported:
            self._skips_reported = float(self._skips_on_host)
            self._fail(
                "a gradient or a parameter was not finite in an earlier step, which the device has "
                f"skipped ({self._skips_reported:.0f} so far): go on with another sample"
            )

    def _check_gradients(self, groups: list[TensorGroup]) -> Tensor | None:
        """Raise for a gradient that is not finite; on a device return a flag, and raise later."""
        self._raise_if_skipped()
        if not (self._check_finite and groups):
            return None
        parts = [(t.process_groups, t.kernels.any_nonfinite(t)) for t in groups]
        nonfinite = parts[0][1]
        if self._mesh_groups or len(parts) > 1:
            nonfinite = self._total(parts, agree=True) > 0
        if not self._shared_table.on_host:
            flag: Tensor = nonfinite.to(self._shared_table.tensor.device, non_blocking=True)
            return flag
        if nonfinite:
            self._fail_nonfinite(NOTHING_MOVED)
        return None

    def _count_skip(self, skip: Tensor) -> None:
        """Count a step on a device if the flag is set, and let the host know one step late."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            # An overflow found by GradScaler is not an error: do not count it.
            skip = skip & (found_inf.to(skip.device, non_blocking=True).reshape(()) == 0)
        count = self._shared_table.rows["skipped"][0].add_(skip)
        # A device without events, as XLA, would be waited for.
        module = getattr(torch, count.device.type, None)
        if torch.compiler.is_compiling() or not hasattr(module, "Event"):
            return
        if self._skips_on_host is None:
            pinned = count.device.type in ("cuda", "xpu")
            self._skips_on_host = torch.zeros_like(count, device="cpu", pin_memory=pinned)
        self._skips_on_host.copy_(count, non_blocking=True)

    def _fail_nonfinite(self, advice: str) -> NoReturn:
        self._fail(f"{describe_nonfinite(self.param_groups)}; {advice}")

    def _fail(self, message: str) -> NoReturn:
        self._notify("failed")
        raise FloatingPointError(message)

    # -- parameters ------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; each starts at its first gradient."""
        split_named_parameters(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            self._check_added(group)
        except Exception:
            self.param_groups.pop()  # a rejected group leaves no trace
            raise
        if self._infos:
            self._rebuild()

    @torch.inference_mode(False)  # a tensor created inside could not be updated later
    def _rebuild(self) -> None:
        """Make state for new parameters, drop that of removed ones, and make new tables."""
        entries = [entry for entry in self.state.values() if isinstance(entry, dict)]
        self._shared_state: State = _checkpoint.scalars_of(entries) or {
            "format": _checkpoint.FORMAT,
            "identity": _checkpoint.encode(self._identity()),
            **self._initial_flags(),
        }
        params = self.parameters()
        for p in self.state.keys() - set(params):
            if isinstance(p, Tensor):
                del self.state[p]
        known = {id(info.p): info for info in self._infos}
        self._infos, self._group_keys = [], dict[Any, int]()
        for group in self.param_groups:
            for p in group["params"]:
                info = ParamInfo(p, group, self.state[p], len(self._infos), norm_groups(p))
                info.state.setdefault("initialized", 0)
                info.left_out = not p.requires_grad
                if id(p) in known:
                    info.left_out = known[id(p)].left_out
                    info.average_version = known[id(p)].average_version
                self._infos.append(info)
        self._known_groups = self._groups_now()
        # In the same order on every rank.
        mesh_groups = (g for p in params for g in norm_groups(p, replicas=True))
        self._mesh_groups = list(dict.fromkeys(mesh_groups))
        shard_groups = (g for info in self._infos for g in info.process_groups)
        self._shard_groups = list(dict.fromkeys(shard_groups))
        self._place_state()
        self._where = self._main_parameter()
        self._devices_differ = any(p.device != self._where.device for p in params)
        device, states = self._where.device, [info.state for info in self._infos]
        self._shared_table = ScalarTable(self._shared_initial, [self._shared_state], device)
        self._tensor_table = ScalarTable(self._tensor_initial, states, device)

    def _main_parameter(self) -> Tensor:
        """Return the parameter whose device has the numbers: an accelerator, if one is trained."""
        params = reversed(self.parameters())
        return max(params, key=lambda p: (p.requires_grad, p.device.type != "cpu"))

    def _groups_now(self) -> list[tuple[int, ...]]:
        """Return what changes if groups or parameters are added, removed or replaced."""
        return [(id(group), *map(id, group["params"])) for group in self.param_groups]

    def _place_state(self) -> None:
        """Place buffers beside their parameters, and `scalars` with the last trainable one."""
        self._state_owner = self._infos[-1].p
        for info in self._infos:
            info.state.pop("scalars", None)
            if info.p.requires_grad:
                self._state_owner = info.p
            if info.p.requires_grad or info.state["initialized"]:
                self._place_buffers(info)
        self.state[self._state_owner]["scalars"] = self._shared_state

    @torch.inference_mode(False)
    def _place_buffers(self, info: ParamInfo) -> None:
        """Make a parameter's buffers, or let them follow it after `.to()`."""
        p, state, kinds = info.p, info.state, self._buffers(info.p)
        if info.layout == layout(p):
            return
        info.layout, info.process_groups = layout(p), norm_groups(p)  # raises for FSDP1
        for name in self._buffer_names:
            if name in kinds:
                state[name] = kinds[name].placed(p, state.get(name))
            else:
                state.pop(name, None)
        if self._tensor_initial:
            info.coordinates = SampledCoordinates.of(p)

    def _refresh(self) -> None:
        """Adopt parameters if the groups have changed; raise if the state was emptied."""
        compiling = torch.compiler.is_compiling()
        for table in (self._shared_table, self._tensor_table):
            on_host = table.tensor.device.type == "cpu" and not compiling
            moved = on_host and table.tensor.data_ptr() != table.address  # by share_memory_()
            if moved or on_host != table.on_host:
                table.bind(on_host=on_host)
        if compiling:  # reading self.state would add guards and recompile
            return
        scalars = self.state.get(self._state_owner, {}).get("scalars")
        if scalars is None:
            raise RuntimeError(
                "opt.state was emptied or edited: call opt.reset() to start over, or load a state "
                "with opt.load_state_dict()"
            )
        if self._devices_differ:  # one may have been frozen or unfrozen
            self._where = self._main_parameter()
        if (
            scalars is not self._shared_state  # Lightning copies dictionaries
            or self._groups_now() != self._known_groups
            or self._shared_table.tensor.device != self._where.device
        ):
            self._rebuild()

    def _collect(self, *, missing_is_zero: bool) -> list[TensorGroup]:
        """Sort the parameters that take part in a pass into groups, without their buffers.

        A parameter waits for its first gradient. With `missing_is_zero`, for pairs, it then takes
        part without one too, until it is frozen, and starts over when it is unfrozen: its estimator
        would be that of another point.
        """
        self._refresh()
        groups: dict[Any, TensorGroup] = {}
        traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        for info in self._infos:
            p, state = info.p, info.state
            g, is_initialized = p.grad, state["initialized"]
            info.left_out = not p.requires_grad
            if info.left_out:
                if missing_is_zero:
                    state["initialized"] = 0
                continue
            if g is None:
                if not (missing_is_zero and is_initialized):
                    continue
                g = torch.zeros_like(p)
            if g.layout != torch.strided:
                reject_gradient(self.param_groups, p, g)
            # Cache the backend: choosing it costs a third of a step on 8 small tensors.
            x_strides, g_strides = p.is_contiguous() or p.stride(), g.is_contiguous() or g.stride()
            key = p.device, p.dtype, p.shape, x_strides, g.dtype, g_strides, traced
            if key != info.key:
                self._choose_backend(info, g, key)
            if info.kernels is None:
                continue  # it has no elements
            if traced or g.is_neg():  # cheaper than the call below; it cannot be traced
                g = g.resolve_neg()
            if info.is_ordinary:
                x = p
            else:
                x, g, state = local_tensors(p, g, state, self._buffer_names)
            tensors = groups.get((info.group_key, is_initialized))
            if tensors is None:
                tensors = TensorGroup(info.param_group, info.kernels, x.device, info.process_groups)
                tensors.is_new = not is_initialized
                groups[info.group_key, is_initialized] = tensors
            tensors.indices.append(info.index)
            tensors.params.append(x)
            tensors.grads.append(g)
            tensors.states.append(state)
        return list(groups.values())

    def _choose_backend(self, info: ParamInfo, g: Tensor, key: tuple[Any, ...]) -> None:
        """Place a parameter's buffers if it has changed, and choose its backend."""
        p = info.p
        if g.shape != p.shape:
            reject_gradient(self.param_groups, p, g)
        self._place_buffers(info)
        for name, kind in self._buffers(p).items():
            if info.state[name].shape != kind.shape_for(p):
                raise ValueError(
                    f"a parameter has the shape {tuple(p.shape)}, which its state does not fit: "
                    "it was resized. Call opt.reset() to start over"
                )
        info.key, info.kernels = key, None
        is_contiguous = p.is_contiguous() and g.is_contiguous()
        info.is_ordinary = type(p) in _ORDINARY_TYPES and not p.is_complex() and is_contiguous
        if not p.numel():
            return
        x, g, buffers = local_tensors(p, g, info.state, self._buffer_names)
        if x.device.type == "cpu" and not self._shared_table.on_host and not key[-1]:
            info.kernels = plain  # the flag to skip is on another device
        else:
            tensors = [x, g, *(t for t in buffers.values() if t.shape == x.shape)]
            info.kernels = choose_kernels(tensors, info.param_group.get("foreach"))
        # If the options are per tensor, param groups share a pass.
        param_group = 0 if self._tensor_initial else id(info.param_group)
        where = x.device, x.dtype, g.dtype, info.process_groups
        group_key = param_group, info.kernels.__name__, *where
        info.group_key = self._group_keys.setdefault(group_key, len(self._group_keys))

    def _mark_initialized(self, groups: list[TensorGroup]) -> None:
        for index in (index for tensors in groups if tensors.is_new for index in tensors.indices):
            self._infos[index].state["initialized"] = 1

    def reset(self) -> None:
        """Start over: the state is as after construction, with the parameters as they are."""
        for group in self.param_groups:  # before anything is lost
            check_group(group)
        self.state.clear()
        self._skips_reported, self._skips_on_host = 0.0, None
        self.generation += 1
        self._infos = []
        self._rebuild()

    # -- checkpoints and copies ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to continue bit for bit."""
        self._refresh()
        self._place_state()  # parameters may have been moved, frozen or unfrozen

        def copy_numbers(_: Optimizer, packed: State) -> None:
            copies = self._copied_numbers()
            packed["state"] |= {i: copies[p] for i, p in enumerate(self.parameters())}

        # After pre-hooks, which may call eval(), and before the user's own post-hooks.
        with self.register_state_dict_post_hook(copy_numbers, prepend=True):
            return super().state_dict()

    def _copied_numbers(self) -> defaultdict[Tensor, State]:
        """Return the state with its numbers copied: pickling a view would save the whole table."""
        state = defaultdict(dict, self.state)
        for info, numbers in zip(self._infos, self._tensor_table.snapshot()):
            state[info.p] = info.state | numbers
        (shared,) = self._shared_table.snapshot()
        state[self._state_owner]["scalars"] = self._shared_state | shared
        return state

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state so that the run continues bit for bit; another optimizer's is rejected."""
        saved: State = {}

        def check(_: Optimizer, loaded: State) -> None:
            _checkpoint.check_loadable(loaded, self._identity(), type(self).__name__)
            kinds = [(p, self._buffers(p)) for p in self.parameters()]
            _checkpoint.check_complete(loaded, self.defaults, kinds)
            self._check_loaded(loaded)
            saved.update(loaded)

        def restore(_: Optimizer) -> None:
            # torch has cast every tensor to its parameter's dtype; use the saved ones instead.
            for entry, p in zip(_checkpoint.entries(saved), self.parameters()):
                self.state[p] = _checkpoint.copied(entry)
            self.generation += 1
            self._infos = []
            self._rebuild()
            self._skips_reported, self._skips_on_host = float(self.skipped), None

        with (
            self.register_load_state_dict_pre_hook(check),  # after the user's own
            self.register_load_state_dict_post_hook(restore, prepend=True),  # before them
        ):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_check_finite", "generation", "_skips_reported", *self._copied_names)
        attributes = {name: vars(self)[name] for name in names if name in vars(self)}
        return super().__getstate__() | attributes | {"state": self._copied_numbers()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "generation" in state:  # a copy; torch's loader calls this too
            self._pass_hooks, self._infos = OrderedDict(), []
            self._rebuild()
