"""STORM+, simplified STORM+ and STORM: one template, three rules.

`x_{t+1}`, `a_{t+1}` and `eta_t` are known before the sample `xi_{t+1}` is drawn. So the first
gradient of a sample is taken at x_t, the parameters move, the estimator drops what it no longer
needs, and the second gradient completes it: no previous iterate is stored.

    phase    the next call    what it does
    START    estimate         d <- g
    READY    move             x <- x - lr eta d;  d <- d - g~
    PENDING  estimate         d <- g + (1 - a) d
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]
from torch.optim import optimizer as _hooks

from stormplus import rules
from stormplus.rules import Rule, Sums, describe
from stormplus.torch._base import NOTHING_MOVED, BaseOptimizer
from stormplus.torch._rng import RandomStreams, check_generators, gradients_unchanged, pair_lock
from stormplus.torch._tensors import BufferKind, Number, State, TensorGroup, wide_dtype
from stormplus.torch.kernels import plain
from stormplus.trainers import check_trainer

START, READY, PENDING = 0, 1, 2

_NO_CLOSURE = (
    "takes the gradient twice on the same sample; step() needs a closure:\n"
    "    def closure():\n"
    "        opt.zero_grad(); loss = loss_fn(model(x), y); loss.backward(); return loss\n"
    "    opt.step(closure)\n"
    "Instead: opt.move() and opt.estimate(); with a GradScaler stormplus.scaled_step; in a trainer "
    "stormplus.integrations."
)
_NO_GRADIENT = (
    "the closure has not computed a gradient in its second call: call backward in it; with CUDA "
    "graphs use move() and estimate(), in a trainer stormplus.integrations"
)
_RETRY = (
    "the parameters have moved and the step is pending: evaluate the same sample again and call "
    "estimate(), or go on with step(closure), which restarts the estimator"
)


class PairedOptimizer(BaseOptimizer):
    """SGD with corrected momentum; a rule computes the gain and the step size.

    `opt.step(closure)` takes one sample, on which it calls the closure twice (on the first step
    once). A subclass only sets `rule`.

    A gradient that is not finite raises `FloatingPointError`: on the CPU at once; on an
    accelerator one step late, without waiting: if it is a sample's first, the sample is skipped, if
    it is the second, the estimator restarts.

    A checkpoint or a copy made between the two evaluations restarts the estimator, as `restart()`.

    Pass hooks get "before_move" (`.grad` holds g~), "after_move", "before_estimate" (`.grad` holds
    g), "after_estimate", "failed" (a pass has changed nothing) and "restarted".

    Args:
        params: Parameters, parameter groups, or `named_parameters()` (errors then have names).
        lr: Multiplies eta_t in the move, per group, and enters no rule: the paper's "initial
            step-size". What counts is its value when the parameters move.
        unit: The unit of the gradient. The rule sees g / unit and d / unit, and the move is
            lr eta_t d / unit, as if the loss were divided by `unit`. 1.0 is the paper. "first" is
            the norm of the first gradient that is not zero: nothing depends on the scale of the
            loss, and `lr` is about the length of the first move.
        weight_decay: L2 regularization, part of the objective, or, with `decoupled_weight_decay`,
            x <- x - lr eta_t (d / unit + weight_decay x). Per group.
        decoupled_weight_decay: See `weight_decay`.
        maximize: Maximize the objective instead.
        foreach: False takes one tensor at a time, in pure torch; so does True on a CPU. By default
            the fastest backend is chosen from the tensors.
        replay_rng: Let both evaluations see the same random numbers: torch's own streams, which
            belong to all threads (see `stormplus.pair_lock`), and those of a list of generators.
        check_finite: Detect gradients that are not finite; False saves one read of them.
    """

    rule: Rule
    pending_streams: RandomStreams | None = None  # where those of the pending sample began
    _shared_initial: ClassVar[dict[str, float]] = {
        "step": 0.0,
        "gain": 1.0,
        "step_size": 0.0,
        **Sums().pack(),
        "grad_norm_sq": 0.0,
        "estimator_norm_sq": 0.0,
        "grad_evaluations": 0.0,
        "unit": 0.0,  # until it is known
        "skip": 0.0,  # on a device: whether to skip the pending sample
        "skipped": 0.0,  # on a device: how many were skipped
    }
    _buffer_names = ("estimator",)
    _copied_names = ("rule", "_unit", "_replay_rng")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        unit: float | str = 1.0,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        replay_rng: bool | Iterable[torch.Generator] = True,
        check_finite: bool = True,
    ) -> None:
        self._unit = rules.check_unit(unit)
        self._replay_rng = check_generators(replay_rng)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "foreach": foreach,
        }
        super().__init__(params, defaults, check_finite=check_finite)

    # -- a step ----------------------------------------------------------------------------------

    @_disable_dynamo  # as torch.compiler.disable, without its two seconds of import
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure twice, on the first call once, and return the first loss.

        Args:
            closure: Zeroes the gradients, computes the loss of ONE sample, calls backward and
                returns the loss. It must see the same sample each time it is called.
        """
        if closure is None:
            raise TypeError(f"{type(self).__name__} {_NO_CLOSURE}")
        if not self._trainer_checked:
            check_trainer(self)
            self._trainer_checked = True
        if self._where.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot call a closure: capture move() and estimate()")
        evaluate = torch.enable_grad()(closure)
        with self.lock():
            streams = self.random_streams()
            if self.pending:  # interrupted, and that sample is gone
                self.restart()
            loss = evaluate()
            if not self.started:
                self._estimate()
                return loss
            self._move()
            self.pending_streams = streams
            streams.rewind()
            unchanged = gradients_unchanged([i.p for i in self._infos if i.p.requires_grad])
            evaluate()
            if unchanged():
                raise RuntimeError(_NO_GRADIENT)
            self._estimate()
            return loss

    @torch.no_grad()
    def _move(self) -> None:
        """Move x by -lr eta d / unit, with eta from the last sample, and subtract g~ from d."""
        if self._pass_hooks:
            self._notify("before_move")
        groups = [tensors for tensors in self._tensor_groups() if not tensors.is_new]
        skip = self._check_gradients(groups)
        if self._check_finite and not self._shared_table.on_host:
            # `estimate` skips the same sample.
            self._shared_table.rows["skip"].fill_(0.0 if skip is None else skip)
        scalars = self._read_shared()
        eta = scalars["step_size"]
        eta_over_unit = eta / self._nonzero_unit(scalars["unit"])  # beyond the paper: the unit
        # Beyond the paper: lr, "initial step-size" in its experiments and 1 in its analysis.
        rates = [_learning_rate(tensors.param_group, eta) for tensors in groups]  # may raise
        self._shared_state["phase"] = START  # an interrupted pass leaves no estimator
        for tensors, lr in zip(groups, rates):  # Alg. 1, line 4, and the bracket of line 6
            if tensors.param_group["decoupled_weight_decay"]:
                _decay_decoupled(tensors, lr * eta * tensors.param_group["weight_decay"], skip)
            alpha = lr * eta_over_unit
            tensors.kernels.move(
                tensors, _to_device(alpha, tensors.device), _to_device(skip, tensors.device)
            )
        # The second evaluation must not use weights that autocast has cast before the move.
        torch.clear_autocast_cache()
        self._shared_state["phase"] = PENDING
        self.pending_streams = None  # `same_sample` sets it again in its after_move hook
        if self._pass_hooks:
            self._notify("after_move")

    @torch.no_grad()
    def _estimate(self) -> None:
        """Complete d with the gradient here, and compute a and eta for the next move."""
        if self._pass_hooks:
            self._notify("before_estimate")
        phase, groups = self._shared_state["phase"], self._tensor_groups()
        self._shared_state["phase"] = START  # an interrupted pass leaves no estimator
        scalars, on_host = self._read_shared(), self._shared_table.on_host
        one_minus_a = 1 - scalars["gain"]
        skip = None
        if self._check_finite and not on_host:
            skip = (scalars["skip"] > 0) & (phase == PENDING)
        norms = []
        for tensors in groups:  # Alg. 1, line 6
            if phase == START or tensors.is_new:
                torch._foreach_zero_(tensors.estimators)  # line 1: d is g
            squares = tensors.kernels.estimate(
                tensors,
                _to_device(one_minus_a, tensors.device),
                finite_only=self._check_finite,
                # New parameters take d = g from the first gradient that is there.
                skip=None if tensors.is_new else _to_device(skip, tensors.device),
            )
            norms.append((tensors.process_groups, squares))
        totals = self._total(norms, agree=self._check_finite)
        g_sq, d_sq = totals.tolist() if on_host else totals
        try:
            new = self._next_scalars(scalars, g_sq, d_sq)
        except (OverflowError, ZeroDivisionError):  # Python's floats raise, tensors become inf
            new = {"step": math.inf}
        new["grad_evaluations"] = scalars["grad_evaluations"] + (1 if phase == START else 2)
        if not on_host:
            self._write_on_device(new, skip)
        elif all(map(math.isfinite, new.values())):
            for name, value in new.items():
                self._shared_table.rows[name][0] = value
        elif self._check_finite:
            for tensors in groups:
                if phase == PENDING and not tensors.is_new:
                    plain.undo_estimate(tensors, one_minus_a)
            self._shared_state["phase"] = phase
            self._fail_nonfinite(_RETRY if phase == PENDING else NOTHING_MOVED)
        self._mark_initialized(groups)
        self._shared_state["phase"] = READY
        self._opt_called = True  # lr_scheduler warns without it
        if self._pass_hooks:
            self._notify("after_estimate")

    def _tensor_groups(self) -> list[TensorGroup]:
        """Sort the parameters that take part by options, backend, device, dtype and shards.

        Beyond the paper: a parameter whose first gradient comes later than that of others takes
        d = g then. From then on a missing gradient is a gradient of zero.
        """
        groups = self._collect(missing_is_zero=True)
        for tensors in groups:
            options = tensors.param_group
            tensors.sign = -1.0 if options["maximize"] else 1.0
            if not options["decoupled_weight_decay"]:  # L2 is part of the objective
                tensors.l2 = float(options["weight_decay"])
            tensors.estimators = [state["estimator"] for state in tensors.states]
        if not groups or not any(i.p.requires_grad and i.p.grad is not None for i in self._infos):
            self._notify("failed")
            raise RuntimeError(
                "no trainable parameter with elements has a gradient: the closure must call "
                "loss.backward() every time"
            )
        return groups

    def _read_shared(self) -> State:
        """Return the numbers of the run by name: floats on the CPU, tensors elsewhere."""
        table = self._shared_table
        (column,) = table.tensor.unbind(1)
        return dict(zip(table.names, column.tolist() if table.on_host else column.unbind()))

    def _next_scalars(self, scalars: State, g_sq: Any, d_sq: Any) -> State:
        """Return the scalars after this sample: a and eta (Alg. 1, line 3), sums and norms."""
        # Beyond the paper: the rule sees the loss divided by `unit`.
        unit_here = g_sq**0.5 if self._unit == "first" else self._unit
        unit = scalars["unit"] + (scalars["unit"] == 0) * unit_here
        scale = self._nonzero_unit(unit) ** 2
        t = scalars["step"] + 1
        sums, a, eta = self.rule(Sums.unpack(scalars), g_sq / scale, d_sq / scale, t)
        return {
            "step": t,
            "gain": a,
            "step_size": eta,
            **sums.pack(),
            "grad_norm_sq": g_sq,
            "estimator_norm_sq": d_sq,
            "unit": unit,
        }

    def _nonzero_unit(self, unit: Number) -> Number:
        """Return the unit in use: 1 until the first gradient that is not zero."""
        return unit + (unit == 0) if isinstance(self._unit, str) else self._unit

    def _write_on_device(self, new: State, skip: Tensor | None) -> None:
        """Write the new scalars without reading them, unless the sample is skipped."""
        table = self._shared_table
        numbers = torch.stack([number.to(table.tensor.dtype) for number in new.values()])
        finite = (numbers - numbers == 0).all()  # fewer launches than isfinite()
        if skip is None:
            table.write(new, finite)
            return
        table.write(new, finite & ~skip)
        # Only the second gradient is not finite: a gain of 1 and a step size of 0 restart the
        # estimator. The next sample does not move the parameters, and sets d to its gradient.
        one = torch.ones_like(new["gain"])
        table.write({"gain": one, "step_size": 0 * one}, ~(finite | skip))
        self._count_skip(skip | ~finite)

    # -- the two halves, for loops that own their backward passes --------------------------------

    @property
    def started(self) -> bool:
        """Whether there is an estimator: if not, the next sample takes one evaluation."""
        return bool(self._shared_state["phase"] != START)

    @property
    def pending(self) -> bool:
        """Whether the parameters have moved and the second evaluation is still to come."""
        return bool(self._shared_state["phase"] == PENDING)

    def move(self) -> None:
        """First half of a step, from the sample's first gradient; `estimate()` is the second."""
        if self.pending:
            raise RuntimeError("move() was called: evaluate the same sample and call estimate()")
        if not self.started:
            raise RuntimeError("on the first sample (opt.started is False) call only estimate()")
        self._run_hooks(_hooks._global_optimizer_pre_hooks, self._optimizer_step_pre_hooks)
        self._move()

    def estimate(self) -> None:
        """Second half of a step, and the whole of the first one: `d` from the gradient here."""
        if self._shared_state["phase"] == READY:
            raise RuntimeError("estimate() comes after move(), on the same sample")
        if not self.started:
            self._run_hooks(_hooks._global_optimizer_pre_hooks, self._optimizer_step_pre_hooks)
        self._estimate()
        self._run_hooks(self._optimizer_step_post_hooks, _hooks._global_optimizer_post_hooks)

    def restart(self) -> None:
        """Drop the estimator: the next sample takes one evaluation, d <- g. The sums are kept."""
        # Beyond the paper: for when x was changed from outside, or a sample was interrupted.
        self._shared_state["phase"] = START
        self._notify("restarted")

    def _run_hooks(self, *tables: dict[int, Callable[..., Any]]) -> None:
        for table in tables:
            for hook in table.values():
                hook(self, (), {})

    # -- for observers, same_sample and trainers -------------------------------------------------

    def lock(self) -> AbstractContextManager[Any]:
        """Return the context in which a pair is evaluated; an empty one if no stream is rewound."""
        return nullcontext() if self._replay_rng is None else pair_lock()

    def random_streams(self) -> RandomStreams:
        """Return a snapshot of the random streams that an evaluation may draw from."""
        return RandomStreams([info.p.device for info in self._infos], self._replay_rng)

    def diagnostics(self) -> dict[str, float]:
        """Return where the run stands, in plain floats. Reading them waits for the device."""
        (numbers,) = self._shared_table.snapshot()
        scalars = {name: float(value) for name, value in numbers.items()}
        sums = Sums.unpack(scalars)
        return {name: scalars[name] for name in ("step", "gain", "step_size")} | {
            "grad_norm": scalars["grad_norm_sq"] ** 0.5,
            "estimator_norm": scalars["estimator_norm_sq"] ** 0.5,
            "sum_g_sq": sums.sum_g_sq.total,
            "sum_d_sq_over_a": sums.sum_d_sq_over_a.total,
            "unit": scalars["unit"] or (1.0 if self._unit == "first" else float(self._unit)),
            "grad_evaluations": scalars["grad_evaluations"],
        }

    # -- what the base class needs ---------------------------------------------------------------

    def _buffers(self, p: Tensor) -> dict[str, BufferKind]:
        return {"estimator": BufferKind(wide_dtype(p.dtype))}

    def _identity(self) -> dict[str, Any]:
        rule = getattr(self, "rule", None)  # `describe` rejects None: a subclass has a rule
        return describe(rule) | {"unit": self._unit}

    def _initial_flags(self) -> State:
        return {"phase": START}

    def _copied_numbers(self) -> defaultdict[Tensor, State]:
        state = super()._copied_numbers()
        if self.pending:  # where it is loaded, the next sample may be another one
            state[self._state_owner]["scalars"]["phase"] = START
        return state


class StormPlus(PairedOptimizer):
    """STORM+, Algorithm 1 of Levy, Kavis and Cevher (NeurIPS 2021); see `PairedOptimizer`."""

    rule = rules.StormPlusRule()


class SimplifiedStormPlus(PairedOptimizer):
    """Simplified STORM+, Sec. 4.2 of the paper: the gain is t^(-2/3); see `PairedOptimizer`."""

    rule = rules.SimplifiedStormPlusRule()


class Storm(PairedOptimizer):
    """STORM (Cutkosky and Orabona, NeurIPS 2019), which must know the smoothness.

    `theta`, `w`, `c` and `smoothness` are those of `rules.StormRule`; for the rest see
    `PairedOptimizer`.
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


def _learning_rate(param_group: dict[str, Any], like: Number) -> Number:
    """Return a group's lr: a float, or a tensor on the device of `like`."""
    lr = param_group["lr"]
    if isinstance(lr, Tensor) and isinstance(like, Tensor):
        return lr.to(like, non_blocking=True).reshape(())
    if float(lr) < 0:
        raise ValueError(f"lr must be at least 0, got {lr!r}: a schedule has run past its end")
    return float(lr)


def _decay_decoupled(tensors: TensorGroup, decay: Number, skip: Tensor | None) -> None:
    """Beyond the paper: x <- (1 - lr eta weight_decay) x, decoupled as AdamW's."""
    if not isinstance(decay, Tensor):
        torch._foreach_mul_(tensors.params, 1 - decay)
        return
    if skip is not None:
        decay = torch.where(skip, 0, decay)
    # Rounded to half precision, 1 - decay would lose more digits than decay.
    decayed = torch._foreach_mul(tensors.params, decay.to(tensors.params[0], non_blocking=True))
    torch._foreach_sub_(tensors.params, decayed)


def _to_device(number: Number | None, device: torch.device) -> Any:
    if not isinstance(number, Tensor):
        return number
    return number.to(device, non_blocking=device.type != "cpu")  # a CPU could read it too early
