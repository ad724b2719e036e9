"""What an optimizer remembers between steps, under torch's contract for optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stormplus.rules import Rule
from stormplus.torch import loading
from stormplus.torch import state as states
from stormplus.torch.options import Options, check_group
from stormplus.torch.same_sample import RandomStreams, RunningStatistics, same_sample
from stormplus.torch.sharding import check_whole
from stormplus.torch.work import Work, gather

START, READY, PENDING = 0, 1, 2


class RememberingOptimizer(Optimizer):
    """State that exists from construction, grows with the parameters and survives loading."""

    rule: Rule
    extra_scalars: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ("estimator",)

    def __init__(self, params: Any, options: Options, defaults: dict[str, Any]) -> None:
        self._options = options
        self._samples: list[same_sample] = []  # contexts around the present sample
        self._statistics: RunningStatistics | None = None  # before its last evaluation
        super().__init__(params, defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("the optimizer got parameter groups with no parameter in them")

    @property
    def _home(self) -> dict[str, Any]:
        """The state of the first trainable parameter, where the rule's numbers live.

        Of a trainable one, for torch's distributed checkpoint leaves out what belongs to
        frozen parameters; so the numbers move on when theirs is frozen.
        """
        keeper = next((p for p in self._params() if p.requires_grad), next(self._params()))
        if keeper is not self.__dict__.get("_keeper"):
            states.move_header([self.state[p] for p in self._params()], self.state[keeper])
            self._keeper = keeper
        home: dict[str, Any] = self.state[keeper]
        return home

    def _params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _settle(self, p: Tensor) -> None:
        for name in self.buffers:
            states.settle_buffer(p, self.state[p], name)

    def _gather(self) -> Work:
        return gather(self.param_groups, self.state, self._home, self._options, self.buffers)

    def _advance(self, phase: int) -> None:
        self._home["phase"] = phase
        self._home["grad_evaluations"] += 1

    @property
    def started(self) -> bool:
        """Whether there is an estimator: if not, the next sample takes one evaluation."""
        return bool(self._home["phase"] != START)

    @property
    def pending(self) -> bool:
        """Whether the parameters have moved and the second evaluation is still to come."""
        return bool(self._home["phase"] == PENDING)

    def diagnostics(self) -> dict[str, float]:
        """Where the run stands, in plain floats.

        `step`, `gain` (a_{t+1}), `step_size` (eta_t), `grad_norm`, `estimator_norm`,
        `sum_g_sq`, `sum_d_sq_over_a`, `grad_evaluations`. With a scope other than
        "global", norms and sums are totals, `gain` and `step_size` means, `step` the
        largest, and each comes with its `_min` and `_max` over the buckets.
        """
        return states.diagnose(self._home, several=self._options.scope != "global")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; each takes d = g at its first gradient."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            check_whole(self.param_groups[-1]["params"])
        except Exception:
            self.param_groups.pop()  # a refused group leaves no trace
            raise
        for p in self.param_groups[-1]["params"]:
            self.state[p] = {"joined": 0}
            if p.requires_grad:
                self._settle(p)
        if any(group["params"] for group in self.param_groups):
            self._make_room()

    def _make_room(self) -> None:
        home, groups = self._home, self.param_groups
        counts = {
            "global": 1,
            "group": len(groups),
            "tensor": sum(len(g["params"]) for g in groups),
        }
        fresh = states.new_scalars(
            self._keeper.device, counts[self._options.scope], self.extra_scalars
        )
        if "format" in home:  # keep what the buckets so far have learned
            known = len(home["step"])
            fresh = {name: torch.cat([home[name], new[known:]]) for name, new in fresh.items()}
        header = states.new_header(self.rule, self._options)
        # Where the random streams of a pending sample began. The distributed checkpoint loads
        # only what is there already, so there is room for it from the start.
        header["rng"] = torch.zeros(self._random_streams().size, dtype=torch.uint8)
        home |= header | home | fresh

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on bit by bit."""
        _ = self._home  # parameters may have been frozen or unfrozen since
        for p in self._params():
            if p.requires_grad:  # what a fresh optimizer has, so that each fits the other
                self._settle(p)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state so that the run goes on bit by bit; another optimizer's is refused."""
        saved: dict[str, Any] = {}

        def look(_: Optimizer, loaded: dict[str, Any]) -> None:
            loading.check_loadable(loaded, self._home, type(self).__name__)
            loading.check_shapes(loaded, self.param_groups)
            saved.update(loaded)

        def put_back(_: Optimizer) -> None:
            # torch has cast every tensor to its parameter's dtype; the saved ones go back.
            vars(self).pop("_keeper", None)
            for i, p in zip(loading.ids(saved), self._params()):
                self.state[p] = loading.restored(saved["state"].get(i, {"joined": 0}), p)

        hooks = (
            self.register_load_state_dict_pre_hook(look),  # after the user's own
            self.register_load_state_dict_post_hook(put_back, prepend=True),  # before them
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _random_streams(self) -> RandomStreams:
        devices = dict.fromkeys(p.device for p in self._params())
        return RandomStreams(devices, self._options.generators)

    def _put_statistics_back(self) -> None:
        """A sample that is not finite has not been seen by running statistics either."""
        for sample in self._samples:
            sample.put_back()
        if self._statistics is not None:
            self._statistics.put_back()
            self._statistics = None

    def _run_hooks(self, *hooks: dict[int, Callable[..., Any]]) -> None:
        for hook in chain.from_iterable(table.values() for table in hooks):
            hook(self, (), {})

    def __getstate__(self) -> dict[str, Any]:
        own = {"rule": self.rule, "_options": self._options, "_samples": [], "_statistics": None}
        return super().__getstate__() | own
