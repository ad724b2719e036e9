"""The template: Algorithm 1 in the order that needs one buffer.

`x_{t+1}`, `a_{t+1}` and `eta_t` are known before the sample `xi_{t+1}` is drawn. So the
first gradient of a sample is taken at x_t, the parameters move, the estimator drops what
it no longer needs, and the second gradient completes it: no previous iterate is stored.

    phase    the next call    what it does
    START    estimate         d <- g
    READY    move             x <- x - lr eta d;  d <- d - g~
    PENDING  estimate         d <- g + (1 - a) d
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]
from torch.optim import optimizer as torch_optimizer

from stormplus.torch import state as states
from stormplus.torch.kernels import undo_estimate
from stormplus.torch.memory import PENDING, READY, START, RememberingOptimizer
from stormplus.torch.norms import Part, collect
from stormplus.torch.options import Options, closure_needed
from stormplus.torch.work import JOINED, FreshGradients, Work, blame

_RETRY = {  # by whether the parameters are where they were
    True: "nothing has moved: go on with another sample",
    False: "the parameters have moved and the step is pending: evaluate the same sample again "
    "and call estimate(), or go on with step(closure), which restarts the estimator",
}


class StormOptimizer(RememberingOptimizer):
    """SGD with corrected momentum; a rule says what the gain and the step size are.

    `opt.step(closure)` takes one sample. The closure zeroes the gradients, computes the
    loss, calls backward and returns the loss; it is called once on the first step and
    twice, on the same sample, on every later one.

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
            list of `torch.Generator` names streams to replay beside torch's own.
        check_finite: Raise `FloatingPointError` on a gradient that is not finite, before
            harm is done. False saves one read of the gradient and every wait for the device.
        max_move: Beyond the paper: a bound on lr eta_t |d_t|, with |d_t| over the parameters
            that share the sums. Decoupled weight decay comes on top. Per group.
    """

    pairs = True  # two gradients a step; `Untuned` can do with one

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
        options = Options(norm, scope, replay_rng, check_finite)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "max_move": max_move,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, options, defaults)

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
            raise TypeError(closure_needed(type(self).__name__))
        evaluate = torch.enable_grad()(closure)
        if self.pending:  # an earlier call was left halfway, and its sample is gone
            self.restart()
        if not self.started:
            loss = evaluate()
            self._estimate()
            return loss
        streams = self._random_streams()
        loss = evaluate()
        self._move()
        if self._options.replay:
            streams.rewind()
        fresh = FreshGradients(self._params())
        try:
            evaluate()
            fresh.check()
            self._estimate()
        except BaseException:
            self._home["rng"] = streams.pack()  # for `same_sample`, should it be completed
            raise
        return loss

    def move(self) -> None:
        """First half of a step: call it when `.grad` holds the new sample's first gradient.

        Afterwards the parameters are at the next point: evaluate the same sample again
        and call `estimate()`.
        """
        if self._home["phase"] != READY:
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
        if self._home["phase"] == READY:
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
        self._home["phase"] = START
        for sample in self._samples:
            sample.abandon()

    @torch.no_grad()
    def _move(self) -> None:
        work = self._gather()
        if self._options.check_finite:
            parts = [part for batch in work.known.values() for part in batch.probes()]
            probe = collect([parts], work.process_groups, self._home["step"])
            if not bool(torch.isfinite(probe).all()):  # waits for the device
                self._put_statistics_back()
                raise FloatingPointError(f"{blame(self.param_groups)}; {_RETRY[True]}")
        self._home["phase"] = START  # a pass that is interrupted leaves no estimator
        for batch in work.known.values():
            batch.kernels.move(batch)  # Alg. 1, line 4, and the bracket of line 6
        self._advance(PENDING)
        if not self._samples:  # nobody knows where this sample's random streams began
            self._home["rng"] = torch.zeros_like(self._home["rng"])
        for sample in self._samples:
            sample.rewind()

    @torch.no_grad()
    def _estimate(self) -> None:
        work = self._gather()
        if not any(work.active):
            raise RuntimeError("no parameter has a gradient: the closure must call loss.backward()")
        phase = self._home["phase"]
        first = phase == START
        self._home["phase"] = START  # a pass that is interrupted leaves no estimator
        g_parts: list[Part] = []
        d_parts: list[Part] = []
        for batch, joining in work.batches():
            g_sq, d_sq = batch.kernels.estimate(  # Alg. 1, line 6, or line 1
                batch, first=first or joining, guard=self._options.check_finite
            )
            g_parts += [(batch.bucket, batch.process_groups, part) for part in g_sq]
            d_parts += [(batch.bucket, batch.process_groups, part) for part in d_sq]
        squares = collect([g_parts, d_parts], work.process_groups, self._home["step"])
        new = self._next_scalars(squares, work)
        finite = torch.isfinite(torch.stack(list(new.values()))).all(dim=0)
        if self._options.check_finite and not bool(finite.all()):  # waits for the device
            for batch in () if first else work.known.values():
                undo_estimate(batch)
            self._home["phase"] = phase
            self._put_statistics_back()
            for sample in () if first else self._samples:
                sample.rewind()  # for another try
            raise FloatingPointError(f"{blame(self.param_groups)}; {_RETRY[first]}")
        used = finite
        if not all(work.active):
            used = finite & torch.tensor(work.active).to(finite.device, non_blocking=True)
        self._home.update({k: torch.where(used, v, self._home[k]) for k, v in new.items()})
        for state in work.newcomers:
            state["joined"] = JOINED
        self._advance(READY)
        self._statistics = None
        self._opt_called = True  # what lr_scheduler looks for before it warns

    def _next_scalars(self, squares: Tensor, work: Work) -> dict[str, Tensor]:
        """Alg. 1, line 3, for every bucket at once."""
        g_sq, d_sq = squares
        size: Tensor | int = 1
        if self._options.norm == "mean":
            # Beyond the paper: the recipe of the authors' published code.
            size = torch.tensor(work.sizes).to(g_sq, non_blocking=True)
        t = self._home["step"] + 1
        units, measured = self._measure_units(work, g_sq / size, size)
        sums, a, eta = self.rule(states.get_sums(self._home), g_sq / size, d_sq / size, t, *units)
        return (
            states.set_sums(sums)
            | measured
            | {
                "step": t,
                "gain": a,
                "step_size": eta,
                "grad_norm_sq": g_sq,
                "estimator_norm_sq": d_sq,
            }
        )

    def _measure_units(
        self, work: Work, g_sq: Tensor, size: Tensor | int
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the rule is told beside the sums, and what is remembered of it: nothing."""
        return (), {}


def takes_pairs(opt: object) -> bool:
    """Whether an optimizer needs two gradients of each sample; those of torch do with one."""
    return isinstance(opt, StormOptimizer) and opt.pairs
