"""Beyond the paper: an optimizer with one gradient a step and nothing to tune.

It is made of known parts. The distance is DoG's (Ivgi, Hinder and Carmon, 2023), the unit of a
coordinate is RMSprop's, and what one evaluates is an average of the iterates (Shamir and Zhang,
2013). STORM+'s corrected estimator is not in it: docs/untuned.md has the study behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]

from stormplus.rules import (
    average_weight,
    first_distance,
    unit_weight,
    untuned_gain,
    untuned_step_size,
)
from stormplus.torch.core.base import BaseOptimizer
from stormplus.torch.core.kernels import FOREACH, SquareNorms, chunks, gradient
from stormplus.torch.core.state import JOINED, State, run_of
from stormplus.torch.core.tensors import Bundle, Roster, Totals, blame


class Untuned(BaseOptimizer):
    """DoG's distance, RMSprop's unit and averaging; STORM+'s estimator is not in it.

    One gradient per step, no learning rate to find.

    With n elements and, in each coordinate, g the gradient:

        r     <- max(r, |x - x_1| / sqrt(n))             distance, one number
        s^2   <- mean of g^2 over some hundred steps     unit, a coordinate's own
        d     <- d + a (g - d),  a = max(0.1, 1/t)       momentum
        x     <- x - lr (r / sqrt(t)) d / s
        average <- mean of x over about the last tenth of the run

    It is a plain torch optimizer: `loss.backward(); opt.step()`, a closure if you like, any
    trainer. `opt.eval()` puts the average into the parameters, to validate or to save a model,
    and `opt.train()` takes it out again.

    Memory: four buffers of the parameters' size (d, s, x_1, the average), Adam has two.

    A pass hook (`register_pass_hook`) is told of "before_step", "after_step", and of "failed"
    when a gradient is not finite and nothing has moved.

    Args:
        params: Parameters, parameter groups, or `named_parameters()`.
        lr: A factor on the step. Leave it at 1.0: r grows by the steps, and a smaller factor keeps
            it small.
        weight_decay: L2 regularisation, part of the objective, or, with
            `decoupled_weight_decay`, added to d / s at the move. Per group.
        decoupled_weight_decay: See `weight_decay`.
        maximize: Maximize the objective instead.
        scope: Which parameters share r: "global", "group" or "tensor".
        average: Keep the average of the iterates; it never influences them.
        check_finite: Raise `FloatingPointError` on a gradient that is not finite, before
            anything has moved.
    """

    _numbers: ClassVar[dict[str, float]] = {
        "step": 0.0,
        "gain": 1.0,
        "step_size": 0.0,
        "distance": 0.0,
        "grad_norm_sq": 0.0,
        "estimator_norm_sq": 0.0,
    }
    _shown = ("step", "gain", "step_size", "distance", "grad_norm", "estimator_norm")
    _kept = ("_average",)
    _lent: ClassVar[dict[str, bool]] = {"iterate": False}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        scope: str = "global",
        average: bool = True,
        check_finite: bool = True,
    ) -> None:
        self._average = Average() if average else None
        buffers = {"estimator": True, "unit": True, "origin": False}
        buffers |= {"average": True} if average else {}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, buffers=buffers, scope=scope, check_finite=check_finite)

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there, or that the closure computes.

        Args:
            closure: Optional: zeroes the gradients, computes the loss, calls backward.

        Returns:
            The closure's loss, or None.
        """
        if self.at_average:
            raise RuntimeError("the parameters hold the average: call opt.train() before step()")
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._descend()
        return loss

    @torch.no_grad()
    def _descend(self) -> None:
        roster = self._roster()
        bundles, run = roster.bundles(), self._run
        if not any(bundle.has_grad for bundle in bundles):
            return  # as torch's own optimizers
        self._tell("before_step")
        if self._check_finite:
            self._probe(bundles, roster)
        t, a, b = run["step"] + 1, run["gain"], unit_weight(run["step"] + 1)
        totals = Totals(4, roster, t)
        for bundle in bundles:
            if bundle.joining:
                _begin_here(bundle)
                _learn(bundle, torch.ones_like(a[0]), torch.ones_like(b[0]), totals.room(bundle))
            else:
                _learn(bundle, a[bundle.bucket], b[bundle.bucket], totals.room(bundle))
        g_sq, d_sq, moved_sq, start_sq = totals.sum()
        size = roster.sizes_like(t)
        r = torch.where(
            run["distance"] == 0, first_distance((start_sq / size).sqrt()), run["distance"]
        )
        r = torch.maximum(r, (moved_sq / size).sqrt())
        eta = untuned_step_size(r, t)
        new = {"step": t, "gain": untuned_gain(t + 1), "step_size": eta, "distance": r}
        new |= {"grad_norm_sq": g_sq, "estimator_norm_sq": d_sq}
        buckets = {bundle.bucket for bundle in bundles}
        seen = torch.tensor([i in buckets for i in range(len(t))]).to(t.device)
        run.update({name: torch.where(seen, value, run[name]) for name, value in new.items()})
        for bundle in bundles:
            _move(bundle, eta[bundle.bucket], self._average, average_weight(t[bundle.bucket]))
            for item in bundle.items:
                item.state["joined"] = JOINED
        run["grad_evaluations"] += 1
        self._opt_called = True  # what lr_scheduler looks for before it warns
        self._tell("after_step")

    def _probe(self, bundles: list[Bundle], roster: Roster) -> None:
        totals = Totals(1, roster, self._run["step"])
        for bundle in bundles:
            FOREACH.probe(bundle, totals.room(bundle))
        if not bool(torch.isfinite(totals.sum()).all()):  # waits for the device
            self._tell("failed")
            raise FloatingPointError(
                f"{blame(self.param_groups)}; nothing has moved: go on with another sample"
            )

    # -- the average -----------------------------------------------------------------------------

    @property
    def at_average(self) -> bool:
        """Whether the parameters hold the average: `eval()` was called, and not `train()`."""
        return bool(self._run["averaged"])

    def eval(self) -> None:
        """Put the average into the parameters: call it before you validate or save a model.

        BatchNorm's running statistics are those of the iterates; near the end of a run that
        makes little difference. Without a step so far, or with `average=False`, the
        parameters stay as they are. Calling it twice is calling it once.
        """
        if self._average is not None and not self.at_average:
            self._average.eval((p, self.state[p]) for p in self.parameters())
            self._run["averaged"] = 1

    def train(self) -> None:
        """Put the last iterate back, exactly, and go on."""
        if self._average is not None:
            self._average.train((p, self.state[p]) for p in self.parameters())
        self._run["averaged"] = 0

    # -- what the base asks for ------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return {"rule": "Untuned", "scope": self._scope, "average": self._average is not None}

    def _begin(self) -> State:
        return {"grad_evaluations": 0, "averaged": 0}

    def _check_options(self, group: dict[str, Any]) -> None:
        """What the base refuses is all there is to refuse."""

    def _check_saved(self, state_dict: State) -> None:
        entries, run = list(state_dict["state"].values()), run_of(state_dict)
        if (
            run
            and run["averaged"]
            and any("iterate" not in e for e in entries if e["joined"] == JOINED)
        ):
            raise ValueError(
                "the state was saved after eval(), and the iterate that train() brings back is not "
                "in it: torch.distributed.checkpoint loads only what is there already. Call "
                "opt.eval() before you load, or opt.train() before you save"
            )


class Average:
    """The mean of the iterates over about the last tenth of a run, and its loan to them."""

    def update(self, average: Tensor, x: Tensor, weight: Tensor) -> None:
        """Take the present iterate in."""
        average.lerp_(x.to(average.dtype), weight.to(average))

    @torch.no_grad()
    def eval(self, params: Iterable[tuple[Tensor, State]]) -> None:
        """Put the average into the parameters, and their iterate aside."""
        for p, state in params:
            if "average" in state:
                state["iterate"] = p.detach().clone()
                if state["joined"] == JOINED:
                    p.copy_(state["average"])

    @torch.no_grad()
    def train(self, params: Iterable[tuple[Tensor, State]]) -> None:
        """Put the iterate back."""
        for p, state in params:
            iterate: Tensor | None = state.pop("iterate", None)
            if iterate is not None:
                p.copy_(iterate)


# -- the passes over memory ----------------------------------------------------------------------

_G, _D, _MOVED, _START = range(4)  # the squared norms that a pass collects


def _begin_here(bundle: Bundle) -> None:
    """The parameters that join start where they are: x_1, and their average so far."""
    for x, _, (_, _, *starts), _ in bundle.items:
        for start in starts:
            start.copy_(x)


def _learn(bundle: Bundle, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Learn from g: d by a (g - d), and s as the root of (1 - b) s^2 + b g^2.

    Adds |g|^2 and |d|^2 to `out`, and |x - x_1|^2, or |x_1|^2 of parameters that join.
    """
    a, b = (weight.to(bundle.device, bundle.dtype) for weight in (a, b))
    squares = SquareNorms(bundle, out)
    for x, g_raw, d, s, origin, *_ in chunks(bundle):
        g = gradient(bundle, x, g_raw)
        g = torch.zeros_like(d) if g is None else g
        d.lerp_(g, a)
        torch.hypot(s * (1 - b).sqrt(), g * b.sqrt(), out=s)  # squares would leave float32
        # As precise as d: the difference of two float16 can leave its range.
        wide = x.to(bundle.dtype)
        away = wide if bundle.joining else wide - origin
        squares.add_all({_G: g, _D: d, _START if bundle.joining else _MOVED: away})


def _move(bundle: Bundle, eta: Tensor, average: Average | None, weight: Tensor) -> None:
    """Move: x <- x - lr eta d / s, where 0/0 is 0."""
    lr, decoupled = bundle.group["lr"], bundle.decoupled
    if isinstance(lr, Tensor):
        lr = lr.to(eta).reshape(())
    alpha = (lr * eta).to(bundle.device, bundle.dtype)
    for x, _, d, s, _, *mean in chunks(bundle):
        step = d / s.clamp_min(torch.finfo(s.dtype).tiny)
        if decoupled:
            step.add_(x, alpha=decoupled)
        x.sub_(step.mul_(alpha))  # half-precision x is rounded once, at the end
        if average is not None:
            average.update(mean[0], x, weight)
