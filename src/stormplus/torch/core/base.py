"""What all optimizers of this package have in common: groups, checkpoints, the run's numbers."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stormplus.rules import SCOPES, check_choice
from stormplus.torch.core import state as states
from stormplus.torch.core.random import is_expanded
from stormplus.torch.core.sharding import check_whole
from stormplus.torch.core.state import FORMAT, JOINED, WAITING, Buffers, Numbers, State
from stormplus.torch.core.tensors import Roster
from stormplus.versions import part_names


def writable() -> torch.inference_mode:
    """Around what makes state: a validation may be in inference mode, and the next step is not."""
    return torch.inference_mode(False)


class BaseOptimizer(Optimizer, ABC):
    """State that exists from construction, grows with the parameters and survives loading.

    It has no step. A subclass says which buffers a parameter has, which numbers a run has, and
    what a checkpoint of it must be told apart by.

    Attributes:
        generation: Grows when the state is loaded or begun anew, and so belongs to whatever
            point the parameters are at.
    """

    _numbers: ClassVar[Mapping[str, float]]  # the run's, one entry a bucket, and how they begin
    _shown: ClassVar[tuple[str, ...]]  # those that `diagnostics` reports
    _kept: ClassVar[tuple[str, ...]]  # what a copy of the optimizer has beside its state
    _lent: ClassVar[Buffers] = {}  # buffers that are there for a while only
    _views: _Views  # of the run, from the first step on
    _renewing = False  # whether groups are added that were here before
    _gathering = False  # whether more groups are to follow
    _absent: ClassVar[Mapping[str, str]] = {}  # arguments that others have, and why not here

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        buffers: Buffers,  # by name
        scope: str,
        check_finite: bool,
    ) -> None:
        check_choice("scope", scope, SCOPES)
        self._buffers, self._scope, self._check_finite = dict(buffers), scope, check_finite
        self._run: State = {}
        self._buckets: list[list[Tensor]] = []  # whose numbers the run has, column by column
        self._known: Roster | None = None
        self._pass_hooks: OrderedDict[int, Callable[[Any, str], Any]] = OrderedDict()
        self.generation = 0
        self._gathering = True
        super().__init__(params, defaults)
        if not self.parameters():
            raise ValueError("the optimizer got parameter groups with no parameter in them")
        self._gathering = False
        self._make_room()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _by_the_name_of_the_class(cls.__init__)  # type: ignore[method-assign]

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What a saved state is bound to, by the names that the user knows."""

    @abstractmethod
    def _begin(self) -> State:
        """The run's integers and bytes, as they are before the first step."""

    @abstractmethod
    def _check_options(self, group: dict[str, Any]) -> None:
        """Refuse a group's own options if they make no sense."""

    @abstractmethod
    def _check_saved(self, state_dict: State) -> None:
        """Refuse a saved state for a reason of the optimizer's own."""

    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def grad_evaluations(self) -> int:
        """How many gradients have been used."""
        return int(self._run["grad_evaluations"])

    def diagnostics(self) -> dict[str, float]:
        """Where the run stands, in plain floats.

        With a scope other than "global", norms and sums are totals, `gain` and `step_size`
        means, `step` and `distance` the largest, and each comes with its `_min` and `_max` over
        the buckets.
        """
        table = torch.stack([self._shown_number(name) for name in self._shown]).cpu().double()
        if (table[0] > 0).any():  # buckets that have not had a gradient yet say nothing
            table = table[:, table[0] > 0]
        out: dict[str, float] = {}
        for name, row in zip(self._shown, table):
            whole = {"gain": row.mean(), "step_size": row.mean()}.get(name, row.sum())
            if name in ("step", "distance"):
                whole = row.max()
            stats = {"": whole}
            if self._scope != "global":
                stats |= {"_min": row.min(), "_max": row.max()}
            for suffix, number in stats.items():
                out[name + suffix] = float(number.sqrt() if name.endswith("_norm") else number)
        return out | {"grad_evaluations": float(self.grad_evaluations)}

    def _shown_number(self, name: str) -> Tensor:
        run = self._run
        value: Tensor = run[f"{name}_sq"] if name.endswith("_norm") else run[name]
        return value + run[f"{name}_lost"] if f"{name}_lost" in run else value

    def register_pass_hook(self, hook: Callable[[Any, str], Any]) -> RemovableHandle:
        """Call `hook(opt, event)` around what a step does; the class says which events there are.

        It is for who watches a run or must act between two passes, whoever started them. Copies
        of the optimizer have none.

        Returns:
            A handle; `handle.remove()` ends it.
        """
        handle = RemovableHandle(self._pass_hooks)
        self._pass_hooks[handle.id] = hook
        return handle

    def _tell(self, event: str) -> None:
        for hook in tuple(self._pass_hooks.values()):
            hook(self, event)

    def _roster(self, *, look: bool = True) -> Roster:
        """Who takes part in this step; the run's numbers are brought to where they are.

        Args:
            look: Look at all parameters. If not, those that were frozen are taken to be so still.
        """
        self._notice_emptied()
        known = self._known
        if known is None or not (
            known.describes(self.param_groups, self.state) if look else known.holds()
        ):
            if self._run:
                self._make_room()
            with writable():
                known = Roster(self.param_groups, self.state, self._scope, self._buffers)
            self._known = known
            self._views = _Views(self._numbers)
        return known

    def _notice_emptied(self) -> None:
        """Begin anew if somebody has emptied `state`, which is how torch's own are reset."""
        if not self._run or "run" in self.state.get(self._keeper, ()):
            return
        if any("joined" in state for state in self.state.values()):
            self._known = None  # the state of one parameter only: `_make_room` sees to it
        else:
            self.reset()

    def _place_run(self, run: State) -> None:
        """Keep the run's numbers with the last trainable parameter: in its state, on its device.

        With a trainable one because torch's distributed checkpoint leaves out the others, and
        with the last because layers are frozen from the first on: a checkpoint can then be
        loaded with more of them frozen.
        """
        for state in self.state.values():
            state.pop("run", None)
        self._keeper = self._last_trainable()
        if "step" in run and run["step"].device != self._keeper.device:
            run = states.copied(run, self._keeper.device)
        self._run = self.state[self._keeper]["run"] = run

    # -- groups ----------------------------------------------------------------------------------

    @writable()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; each begins at its first gradient."""
        part_names(param_group)
        self._notice_emptied()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except Exception:
            self.param_groups.pop()  # a refused group leaves no trace
            raise
        for p in group["params"]:
            self.state[p] = {}
            for name, buffer in self._buffers.items() if p.requires_grad else ():
                buffer.place(p, self.state[p], name)
        if not self._gathering:
            self._make_room()

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_common_options(group)
        self._check_options(group)
        check_whole(group["params"])

    @writable()
    def _make_room(self) -> None:
        """A column of the run's numbers for each bucket: what it has learned, or a fresh one.

        Parameters come, go, hand their state on and lose it; what was learned stays with them.
        """
        self._known = None
        params = self.parameters()
        if not self._run:
            constants = {"format": FORMAT, "identity": states.encoded(self._identity())}
            self._place_run(constants | self._begin())
        present = set(params)
        for p in [p for p in self.state if isinstance(p, Tensor) and p not in present]:
            del self.state[p]
        fresh = len(self._run.get("step", ()))
        columns = self._columns(fresh)
        self._buckets = self._sorted_into_buckets()
        for bucket, i in zip(self._buckets, columns):
            for state in map(self.state.__getitem__, bucket):
                if i == fresh and state.get("joined") == JOINED:  # with numbers that are not here
                    state["joined"] = WAITING
                state.setdefault("joined", WAITING)
        self._pick_columns(columns, fresh, self._last_trainable().device)
        self._place_run(self._run)

    def _last_trainable(self) -> Tensor:
        params = self.parameters()
        return next((p for p in reversed(params) if p.requires_grad), params[-1])

    def _columns(self, fresh: int) -> list[int]:
        """Where the run has the numbers of each bucket of now; `fresh` if nowhere."""
        known: dict[Tensor, list[int]] = {}
        for i, bucket in enumerate(self._buckets):
            for p in bucket:
                known.setdefault(p, []).append(i)
        columns: list[int | None] = []
        handed = []  # buckets of unknown tensors with a state: somebody has put it there
        for bucket in self._sorted_into_buckets():
            found: Counter[int] = Counter()
            for p in bucket:
                places = known.get(p) if "joined" in self.state[p] else None
                if places:  # torch allows duplicates
                    found[places.pop(0) if len(places) > 1 else places[0]] += 1
            columns.append(found.most_common(1)[0][0] if found else None)
            handed.append(not found and any("joined" in self.state[p] for p in bucket))
        taken = set(columns)
        for i, column in enumerate(columns):
            if column is None and handed[i] and i < fresh and i not in taken:
                columns[i] = i  # in the place of another that has left
        return [fresh if column is None else column for column in columns]

    def _pick_columns(self, columns: list[int], fresh: int, device: torch.device) -> None:
        """Put the run's numbers into this order; `fresh` is one that begins."""
        if columns == list(range(fresh)):
            return
        come = len(columns) - fresh
        index = None
        if columns != [*range(fresh), *[fresh] * come]:  # somebody has left
            come, index = 1, torch.tensor(columns, device=device)
        dtype = states.accumulator_dtype(device)
        for name, start in self._numbers.items():
            new = torch.full((come,), start, dtype=dtype, device=device)
            old = self._run.get(name)
            value = new if old is None else torch.cat([old.to(device), new])
            self._run[name] = value if index is None else value[index]

    def _sorted_into_buckets(self) -> list[list[Tensor]]:
        """The parameters by whom they share their sums with."""
        if self._scope == "tensor":
            return [[p] for p in self.parameters()]
        groups: list[list[Tensor]] = [list(group["params"]) for group in self.param_groups]
        return groups if self._scope == "group" else [self.parameters()]

    def reset(self) -> None:
        """Begin anew: the state is as after construction, with the parameters as they are."""
        groups = list(self.param_groups)
        self._renewing = True
        try:
            for group in groups:
                self._check_group(group)  # before anything is lost
            self.param_groups.clear()
            self.state.clear()
            self._run, self._buckets = {}, []
            self.generation += 1
            self._gathering = True
            for group in groups:
                self.add_param_group(group)
        finally:
            self._renewing = self._gathering = False
        self._make_room()

    # -- checkpoints and copies ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on bit by bit."""
        self._roster()  # parameters may have been frozen or unfrozen since

        def copy_entries(_: Optimizer, packed: State) -> None:
            for i, entry in packed["state"].items():  # else they would go on changing
                packed["state"][i] = dict(entry)
                if "run" in entry:
                    run = states.copied(self._run, self._run["step"].device)
                    packed["state"][i]["run"] = run

        # Before the user's own.
        hook = self.register_state_dict_post_hook(copy_entries, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    @writable()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state so that the run goes on bit by bit; another optimizer's is refused."""
        saved: State = {}
        buffers = {**self._buffers, **self._lent}

        def look(_: Optimizer, loaded: State) -> None:
            buckets = len(self._sorted_into_buckets())
            states.check_loadable(loaded, self._run, buckets, self._identity(), type(self).__name__)
            states.check_groups(loaded, self.defaults)
            states.check_shapes(loaded, self.parameters(), buffers)
            self._check_saved(loaded)
            saved.update(loaded)

        def put_back(_: Optimizer) -> None:
            # torch has cast every tensor to its parameter's dtype; the saved ones go back.
            for i, p in zip(states.ids(saved), self.parameters()):
                self.state[p] = states.restored(saved["state"].get(i, {}), p, buffers)
            run = states.run_of(saved)
            assert run is not None  # `look` has refused it
            self._buckets = self._sorted_into_buckets()
            self._place_run(states.copied(run, run["step"].device))
            self._known = None
            self.generation += 1

        hooks = (
            self.register_load_state_dict_pre_hook(look),  # after the user's own
            self.register_load_state_dict_post_hook(put_back, prepend=True),  # before them
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        common = ("_run", "_buckets", "_keeper", "_scope", "_check_finite", "_buffers")
        kept = (*common, "generation", *self._kept)
        own = {name: vars(self)[name] for name in kept if name in vars(self)}
        return super().__getstate__() | own | {"_known": None, "_pass_hooks": OrderedDict()}


class _Views:
    """The run's numbers as NumPy arrays that share their memory, where that is the host's.

    Arithmetic on a few numbers is several times as fast there as on tensors.

    Args:
        names: Of the numbers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._tensors: list[Tensor] = []
        self._places: list[int] = []
        self._arrays: dict[str, Numbers] = {}

    def of(self, run: State) -> dict[str, Numbers]:
        """Made anew when the run's tensors are others, or lie elsewhere (`share_memory_()`)."""
        tensors = [run[name] for name in self._names]
        places = [t.data_ptr() for t in tensors]
        if places != self._places or not all(map(is_, tensors, self._tensors)):
            self._tensors, self._places = tensors, places
            self._arrays = {name: run[name].numpy() for name in self._names}
        return self._arrays


def _by_the_name_of_the_class(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose errors name the class that the user wrote, and the nearest argument.

    Python would name the class that has the constructor, a base of it most often.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        try:
            signature.bind(self, *args, **options)
        except TypeError as error:
            known = _arguments(type(self))
            unknown = [name for name in options if name not in known]
            twins = difflib.get_close_matches(unknown[0], known, 1) if unknown else []
            hint = f"; did you mean {twins[0]}?" if twins else "."
            if unknown and unknown[0] in self._absent:
                hint = f": {self._absent[unknown[0]]}."
            raise TypeError(
                f"{type(self).__name__} {error}{hint} It takes {', '.join(known)}"
            ) from None
        init(self, *args, **options)

    return checked


def _arguments(cls: type) -> list[str]:
    """What a constructor takes, with what it hands on to that of its base."""
    names: list[str] = []
    for init in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        kinds = [(p.name, p.kind) for p in inspect.signature(init).parameters.values()]
        names += [n for n, kind in kinds[1:] if kind in _NAMED and n not in names]
        if all(kind != inspect.Parameter.VAR_KEYWORD for _, kind in kinds):
            break
    return names


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _check_common_options(group: dict[str, Any]) -> None:
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got the shape {tuple(lr.shape)}")
    if not (isinstance(lr, (Real, Tensor)) and 0 <= float(lr) < math.inf):
        raise ValueError(f"lr must be a finite number, at least 0, got {lr!r}; the default is 1.0")
    if not (isinstance(decay, Real) and 0 <= float(decay) < math.inf):
        raise ValueError(f"weight_decay must be a finite number, at least 0, got {decay!r}")
    for p in group["params"]:
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"parameters must be floating point or complex, got {p.dtype}")
        if p.layout != torch.strided:
            raise TypeError(
                f"parameters must be dense, got one of layout {p.layout}: to_dense() it"
            )
        if p.is_conj() or p.is_neg():
            raise ValueError("a parameter is a conjugate or negative view: clone() it first")
        if is_expanded(p):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is an expanded view, whose elements share "
                "memory: clone() it, or optimize what it is a view of"
            )
