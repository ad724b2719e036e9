"""STORM+, simplified STORM+ and STORM: one template, three rules.

`x_{t+1}`, `a_{t+1}` and `eta_t` are known before the sample `xi_{t+1}` is drawn. So the
first gradient of a sample is taken at x_t, the parameters move, the estimator drops what
it no longer needs, and the second gradient completes it: no previous iterate is stored.

    phase    the next call    what it does
    START    estimate         d <- g
    READY    move             x <- x - lr eta d;  d <- d - g~
    PENDING  estimate         d <- g + (1 - a) d
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]
from torch.optim import optimizer as torch_optimizer

from stormplus import rules
from stormplus.rules import NORMS, Rule, Sum, Sums, check_choice, describe
from stormplus.torch.core.base import BaseOptimizer
from stormplus.torch.core.kernels import Number, kernels_for, undo_estimate
from stormplus.torch.core.random import RandomStreams, pair_lock
from stormplus.torch.core.state import JOINED, Buffer, State
from stormplus.torch.core.tensors import (
    Bundle,
    FreshGradients,
    Roster,
    Totals,
    blame,
    evaluate_and_look,
)

START, READY, PENDING = 0, 1, 2

_RETRY = {  # by whether the parameters are where they were
    True: "nothing has moved: go on with another sample",
    False: "the parameters have moved and the step is pending: evaluate the same sample again "
    "and call estimate(), or go on with step(closure), which restarts the estimator",
}


class PairedOptimizer(BaseOptimizer):
    """SGD with corrected momentum; a rule says what the gain and the step size are.

    `opt.step(closure)` takes one sample. The closure zeroes the gradients, computes the
    loss, calls backward and returns the loss; it is called once on the first step and
    twice, on the same sample, on every later one. A subclass has a `rule`, and that is all.

    A pass hook (`register_pass_hook`) is told of "before_move" (`.grad` holds g~), "after_move",
    "before_estimate" (`.grad` holds g), "after_estimate"; of "failed" when a pass has met a
    number that is not finite, or no gradient at all, and has changed nothing; of "restarted"
    when the estimator is given up.

    Args:
        params: Parameters, parameter groups, or `named_parameters()` (errors then have names).
        lr: Multiplies eta_t in the move, per group, and enters no rule: the paper's
            "initial step-size". A number or a tensor, and any scheduler works; the value
            that counts is the one in force when the parameters move.
        weight_decay: L2 regularisation, part of the objective, or, with
            `decoupled_weight_decay`, x <- x - lr eta_t (d + weight_decay x). Per group.
        decoupled_weight_decay: See `weight_decay`.
        maximize: Maximize the objective instead.
        norm: What |.|^2 means in the rules: "raw" (the paper), or "mean", divided by the
            number of trainable elements.
        scope: Which parameters share the sums: "global" (the paper), "group" or "tensor".
        foreach: torch's multi-tensor operations; by default where they are faster.
        fused: Compiled kernels; `torch.compile` needs a C++ compiler for them.
        replay_rng: Let both evaluations of `step` see the same random numbers (dropout). A
            list of `torch.Generator` names streams to replay beside torch's own. torch's own
            belong to all threads: pairs take turns, and a thread that draws beside them must
            do so under `stormplus.pair_lock`, or from a generator of its own. False, where
            closures draw nothing, lets pairs of several threads run at once.
        check_finite: Raise `FloatingPointError` on a gradient that is not finite, before
            harm is done. False saves one read of the gradient and every wait for the device.
        max_move: Beyond the paper: a bound on lr eta_t |d_t|, with |d_t| over the parameters
            that share the sums. Decoupled weight decay comes on top. Per group.
    """

    rule: Rule
    _numbers: ClassVar[dict[str, float]] = {
        "step": 0.0,
        "sum_g_sq": 0.0,
        "sum_g_sq_lost": 0.0,
        "sum_d_sq_over_a": 0.0,
        "sum_d_sq_over_a_lost": 0.0,
        "gain": 1.0,  # a_1
        "step_size": 0.0,
        "grad_norm_sq": 0.0,
        "estimator_norm_sq": 0.0,
    }
    _shown = (
        "step",
        "gain",
        "step_size",
        "grad_norm",
        "estimator_norm",
        "sum_g_sq",
        "sum_d_sq_over_a",
    )
    _kept = ("rule", "_norm", "_generators")
    _absent: ClassVar[dict[str, str]] = {
        "learning_rate": "it is called lr",
        "momentum": "the momentum sets itself, from the gradients that the run measures",
        "betas": "the momentum sets itself, from the gradients that the run measures",
    }
    _looked = False  # whether the closure was seen to zero the gradients

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        norm: str = "raw",
        scope: str = "global",
        foreach: bool | None = None,
        fused: bool | None = None,
        replay_rng: bool | Iterable[torch.Generator] = True,
        check_finite: bool = True,
        max_move: float | None = None,
    ) -> None:
        check_choice("norm", norm, NORMS)
        self._norm, self._generators = norm, _Generators(replay_rng)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "max_move": max_move,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(
            params,
            defaults,
            buffers={"estimator": Buffer()},
            scope=scope,
            check_finite=check_finite,
        )

    # -- a step ----------------------------------------------------------------------------------

    @_disable_dynamo  # as torch.compiler.disable, without its two seconds of import
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one sample: one evaluation on the first call, two on every later one.

        Args:
            closure: Zeroes the gradients, computes the loss of ONE sample, calls backward
                and returns the loss. It must see the same sample each time it is called.

        Returns:
            The loss of the first evaluation.
        """
        if closure is None:
            raise TypeError(closure_needed(self))
        evaluate = torch.enable_grad()(closure)
        with self.lock():
            streams = self.random_streams()
            if self._run["phase"] == PENDING:  # left halfway, and that sample is gone
                self.restart()
            loss = evaluate()
            if self._run["phase"] == START:
                self._estimate()
                return loss
            roster = self._move()
            if self.replays_rng:
                streams.rewind()
            fresh = FreshGradients(roster.params)
            try:
                if self._looked:
                    evaluate()
                else:  # once, at the first pair that can tell
                    self._looked = evaluate_and_look(evaluate, roster.params)
                fresh.check()
                self._estimate()
            except BaseException:
                self.pending_streams = streams.pack()  # for `same_sample`, to complete it
                raise
            return loss

    @torch.no_grad()
    def _move(self) -> Roster:
        self._tell("before_move")
        roster = self._roster()
        bundles = roster.bundles()
        self._require_gradient(bundles)
        bundles = [bundle for bundle in bundles if not bundle.joining]
        if self._check_finite:
            self._probe(bundles, roster)
        self._run["phase"] = START  # a pass that is interrupted leaves no estimator
        now = self._now()
        for bundle in bundles:  # Alg. 1, line 4, and the bracket of line 6
            kernels_for(bundle).move(bundle, self._alpha(bundle, now))
        self._run["phase"] = PENDING
        self._run["grad_evaluations"] += 1
        self.pending_streams = None  # unless somebody knows better: see `same_sample`
        self._tell("after_move")
        return roster

    @torch.no_grad()
    def _estimate(self) -> None:
        self._tell("before_estimate")
        roster = self._roster(look=self._run["phase"] != PENDING)  # else `_move` has looked
        run = self._run
        bundles = roster.bundles()
        self._require_gradient(bundles)
        phase = run["phase"]
        run["phase"] = START  # a pass that is interrupted leaves no estimator
        totals, now = Totals(2, roster, run["step"]), self._now()
        for bundle in bundles:  # Alg. 1, line 6, or line 1
            kernels_for(bundle).estimate(
                bundle,
                self._keep(bundle, now),
                totals.room(bundle),
                first=phase == START or bundle.joining,
                guard=self._check_finite,
            )
        squares = totals.sum()
        on_host = now is not run
        with np.errstate(all="ignore"):  # what is not finite is found below
            new = self._next_numbers(now, squares.numpy() if on_host else squares, roster)
        # A table first: a rule may hand on a number that it was given, and those change below.
        table: Any = np.array(list(new.values())) if on_host else torch.stack(list(new.values()))
        finite: Any = (np.isfinite(table) if on_host else torch.isfinite(table)).all(0)
        if self._check_finite and not bool(finite.all()):  # waits for the device
            if phase != START:
                for bundle in (bundle for bundle in bundles if not bundle.joining):
                    undo_estimate(bundle, self._keep(bundle, now))
            run["phase"] = phase
            self._tell("failed")
            raise FloatingPointError(f"{blame(self.param_groups)}; {_RETRY[phase == START]}")
        buckets = {bundle.bucket for bundle in bundles}
        if len(buckets) < len(finite):  # the others have had no gradient
            seen: Any = np.array([i in buckets for i in range(len(finite))])
            if not on_host:
                seen = torch.from_numpy(seen).to(finite.device, non_blocking=True)
            finite = finite & seen
        for name, value in zip(new, table):
            if on_host:
                np.copyto(now[name], value, where=finite)
            else:
                run[name] = torch.where(finite, value, run[name])
        for item in chain.from_iterable(bundle.items for bundle in bundles if bundle.joining):
            item.state["joined"] = JOINED
        run["phase"] = READY
        run["grad_evaluations"] += 1
        self._opt_called = True  # what lr_scheduler looks for before it warns
        self._tell("after_estimate")

    def _next_numbers(self, run: State, squares: Any, roster: Roster) -> dict[str, Any]:
        """Alg. 1, line 3, for every bucket at once, on arrays or on tensors."""
        g_sq, d_sq = squares
        size: Any = 1
        if self._norm == "mean":
            # Beyond the paper: the recipe of the authors' published code.
            size = roster.sizes_like(g_sq)
        t = run["step"] + 1
        sums = Sums(
            Sum(run["sum_g_sq"], run["sum_g_sq_lost"]),
            Sum(run["sum_d_sq_over_a"], run["sum_d_sq_over_a_lost"]),
        )
        sums, a, eta = self.rule(sums, g_sq / size, d_sq / size, t)
        return {
            "step": t,
            "gain": a,
            "step_size": eta,
            "grad_norm_sq": g_sq,
            "estimator_norm_sq": d_sq,
            "sum_g_sq": sums.sum_g_sq.value,
            "sum_g_sq_lost": sums.sum_g_sq.lost,
            "sum_d_sq_over_a": sums.sum_d_sq_over_a.value,
            "sum_d_sq_over_a_lost": sums.sum_d_sq_over_a.lost,
        }

    def _alpha(self, bundle: Bundle, run: State) -> Number:
        """The factor of d in the move."""
        bucket = bundle.bucket
        eta, d_sq = run["step_size"][bucket], run["estimator_norm_sq"][bucket]
        lr, bound = bundle.group["lr"], bundle.group["max_move"]
        # Beyond the paper: lr, "initial step-size" in its experiments and 1 in its analysis. And
        # lr eta |d| <= max_move, with |d| over the bucket.
        if run is not self._run:
            alpha = float(lr) * float(eta)
            return min(alpha, bound / math.sqrt(d_sq)) if bound is not None and d_sq > 0 else alpha
        if isinstance(lr, Tensor):
            lr = lr.to(eta, non_blocking=True).reshape(())
        scaled: Tensor = lr * eta
        if bound is not None:
            scaled = torch.minimum(scaled, bound / d_sq.sqrt())
        return scaled.to(bundle.device, non_blocking=True)

    def _keep(self, bundle: Bundle, run: State) -> Number:
        """The factor of the innovation in the estimate, 1 - a."""
        keep = 1 - run["gain"][bundle.bucket]
        if isinstance(keep, Tensor):
            return keep.to(bundle.device, non_blocking=True)
        return float(keep)

    def _now(self) -> State:
        """The numbers of the run: on the host arrays, which are faster, elsewhere tensors."""
        step = self._run["step"]
        # A fake tensor is of another type.
        on_host = step.device.type == "cpu" and type(step) is Tensor
        return self._views.of(self._run) if on_host else self._run

    def _require_gradient(self, bundles: list[Bundle]) -> None:
        """One that is missing is zero; if all are, half a pair would be missing."""
        if not any(bundle.has_grad for bundle in bundles):
            self._tell("failed")
            raise RuntimeError(
                "no parameter has a gradient: the closure must call loss.backward(), each time "
                "that it is called"
            )

    def _probe(self, bundles: list[Bundle], roster: Roster) -> None:
        """Refuse a first gradient that is not finite: nothing has moved yet."""
        found = [kernels_for(bundle).probe(bundle) for bundle in bundles]
        if any(roster.process_groups) or any(isinstance(number, Tensor) for number in found):
            totals = Totals(1, roster, self._run["step"])
            for bundle, number in zip(bundles, found):
                totals.room(bundle)[0] += number
            found = [totals.sum().sum()]
        if not all(map(math.isfinite, found)):  # waits for the device
            self._tell("failed")
            raise FloatingPointError(f"{blame(self.param_groups)}; {_RETRY[True]}")

    # -- the two halves, for loops that own their backward passes --------------------------------

    @property
    def started(self) -> bool:
        """Whether there is an estimator: if not, the next sample takes one evaluation."""
        self._notice_emptied()
        return bool(self._run["phase"] != START)

    @property
    def pending(self) -> bool:
        """Whether the parameters have moved and the second evaluation is still to come."""
        self._notice_emptied()
        return bool(self._run["phase"] == PENDING)

    def move(self) -> None:
        """First half of a step: call it when `.grad` holds the new sample's first gradient.

        Afterwards the parameters are at the next point: evaluate the same sample again
        and call `estimate()`.
        """
        if self.pending or not self.started:
            raise RuntimeError(
                "move() comes after estimate(): "
                + (
                    "evaluate the same sample again and call estimate(), or drop it with restart()"
                    if self.pending
                    else "on the first sample (opt.started is False) call only estimate()"
                )
            )
        self._run_hooks(torch_optimizer._global_optimizer_pre_hooks, self._optimizer_step_pre_hooks)
        self._move()

    def estimate(self) -> None:
        """Second half of a step, and the whole of the first one: `d` from the gradient here."""
        if self.started and not self.pending:
            raise RuntimeError(
                "estimate() comes after move(): evaluate a new sample, call move(), evaluate "
                "the same sample again, then call estimate()"
            )
        if not self.started:
            self._run_hooks(
                torch_optimizer._global_optimizer_pre_hooks, self._optimizer_step_pre_hooks
            )
        self._estimate()
        self._run_hooks(
            self._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks
        )

    def restart(self) -> None:
        """Forget the estimator: the next sample takes one evaluation, d <- g. Sums are kept."""
        # Beyond the paper: for when x was changed from outside, or a sample lost halfway.
        self._run["phase"] = START
        self._tell("restarted")

    def _run_hooks(self, *hooks: dict[int, Callable[..., Any]]) -> None:
        for hook in chain.from_iterable(table.values() for table in hooks):
            hook(self, (), {})

    # -- what others may stand on: observers, same_sample, trainers ------------------------------

    def has_estimator(self, p: Tensor) -> bool:
        """Whether a parameter takes part: it is trainable and has had a gradient."""
        return p.requires_grad and bool(self.state.get(p, {}).get("joined") == JOINED)

    @property
    def replays_rng(self) -> bool:
        """Whether both evaluations are to see the same random numbers."""
        return self._generators.replay

    def lock(self) -> AbstractContextManager[None]:
        """What a pair of this optimizer is evaluated under; nothing if no stream is rewound."""
        return pair_lock() if self.replays_rng else nullcontext()

    def random_streams(self) -> RandomStreams:
        """Where the random streams stand that an evaluation may draw from."""
        return RandomStreams(self._roster(look=False).devices, self._generators.own)

    @property
    def pending_streams(self) -> Tensor | None:
        """Where the random streams of the pending sample began, packed; None if unknown."""
        packed: Tensor = self._run["rng"]
        return packed if bool(packed.any()) else None

    @pending_streams.setter
    def pending_streams(self, packed: Tensor | None) -> None:
        self._run["rng"] = torch.zeros_like(self._run["rng"]) if packed is None else packed

    # -- what the base asks for ------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        rule = getattr(self, "rule", None)  # None is refused: a subclass has one
        return describe(rule) | {"norm": self._norm, "scope": self._scope}

    def _begin(self) -> State:
        # The distributed checkpoint loads only what is there already: so there is room for the
        # random streams of a pending sample from the start.
        rng = torch.zeros(self.random_streams().size, dtype=torch.uint8)
        return {"phase": START, "grad_evaluations": 0, "rng": rng}

    def _check_options(self, group: dict[str, Any]) -> None:
        bound = group["max_move"]
        if bound is not None and not (isinstance(bound, Real) and 0 < float(bound) < math.inf):
            raise ValueError(
                f"max_move must be a positive number or None (no bound), got {bound!r}"
            )
        if group["foreach"] and group["fused"]:
            raise ValueError("foreach and fused are two ways of doing the same: ask for one")

    def _check_saved(self, state_dict: State) -> None:
        """What the base refuses is all there is to refuse."""


class StormPlus(PairedOptimizer):
    """STORM+, Algorithm 1 of Levy, Kavis and Cevher (NeurIPS 2021).

    The arguments are those of `PairedOptimizer`.
    """

    rule = rules.StormPlusRule()


class SimplifiedStormPlus(PairedOptimizer):
    """Simplified STORM+, Sec. 4.2 of the paper: the gain is t^(-2/3), whatever is measured.

    The arguments are those of `PairedOptimizer`.
    """

    rule = rules.SimplifiedStormPlusRule()


class Storm(PairedOptimizer):
    """STORM (Cutkosky and Orabona, NeurIPS 2019), which must know the smoothness.

    Args:
        params: As for `PairedOptimizer`.
        lr: As for `PairedOptimizer`.
        theta: Numerator of the step size.
        w: Offset under its cube root.
        c: Factor of the gain.
        smoothness: L, the smoothness of the objective.
        **options: Every other argument of `PairedOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        theta: float = 0.1,
        w: float = 0.1,
        c: float = 100.0,
        smoothness: float = 1.0,
        **options: Any,
    ) -> None:
        self.rule = rules.StormRule(theta, w, c, smoothness)
        super().__init__(params, lr, **options)


class _Generators:
    """The random streams to replay: torch's own, and the user's."""

    def __init__(self, replay_rng: bool | Iterable[torch.Generator]) -> None:
        self.replay = replay_rng is not False
        given: Any = () if isinstance(replay_rng, bool) else replay_rng
        self.own = tuple(given) if isinstance(given, Iterable) else (given,)
        for generator in self.own:
            if not isinstance(generator, torch.Generator):
                raise TypeError(
                    "replay_rng must be True, False or a list of torch.Generator, "
                    f"got {generator!r}"
                )

    def __deepcopy__(self, memo: Any) -> _Generators:
        return self  # a copy of an optimizer replays the user's generators, not copies of them


def closure_needed(opt: object) -> str:
    """What to say to who calls `step()` without a closure."""
    return (
        f"{type(opt).__name__} takes the gradient twice on the same sample, so step() needs a "
        "closure:\n"
        "    def closure():\n"
        "        opt.zero_grad(); loss = loss_fn(model(x), y); loss.backward(); return loss\n"
        "    opt.step(closure)\n"
        "In a loop that owns its backward passes use opt.move() and opt.estimate() instead; "
        "with a GradScaler, stormplus.scaled_step(opt, scaler, closure, model); inside a trainer, "
        "stormplus.integrations."
    )


def require_pairs(opt: object, what: str, instead: str = "opt.step()") -> None:
    """Refuse to make pairs of gradients for an optimizer that takes one."""
    if not isinstance(opt, PairedOptimizer):
        raise ValueError(
            f"{type(opt).__name__} takes one gradient a step: {what} is not needed, call "
            f"{instead} as usual"
        )
