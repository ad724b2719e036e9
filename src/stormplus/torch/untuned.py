"""Beyond the paper: an optimizer with one gradient per step and nothing to tune.

The distance is DoG's (Ivgi, Hinder and Carmon, 2023), the division by a root mean square is that of
RMSprop, the interpolation Schedule-Free's (Defazio and others, 2024), the average Shamir and
Zhang's (2013). STORM+'s estimator is not in it: docs/untuned-study.md has the study behind that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, compress
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stormplus import untuned_rule as rule
from stormplus.torch._average import AveragedOptimizer
from stormplus.torch._checks import NO_LR, parameter_name, reject_lr, warn
from stormplus.torch._sharding import coordinate_count
from stormplus.torch._tensors import Numbers, State, TensorGroup
from stormplus.torch.kernels import plain
from stormplus.torch.kernels.plain import UntunedCoefficients
from stormplus.trainers import check_trainer


class _PerTensorOptions(NamedTuple):
    """What is constant between steps, with one entry per tensor."""

    lr: Numbers  # lr times the group's factor
    weight_decay: Numbers
    sign: Numbers  # -1 to maximize
    eligible: Numbers  # see `untuned_rule.eligible_tensors`; frozen tensors are not
    size: Numbers
    sample_count: Numbers  # on how many coordinates the distance is measured
    natural_scale: Numbers


class Untuned(AveragedOptimizer):
    """One gradient per step, Adam's memory, and nothing to tune.

    Every tensor has a distance r and a scale R; with g the gradient, in each coordinate:

        s^2  <- mean of g^2 over about the last third of the run        RMS gradient
        z    <- z - clip(eta g / s, -r, r)                              fast iterate
        x    <- mean of z over about the last tenth of the run          average
        y     = 0.1 z + 0.9 x                                           parameters
        r    <- min(max(r, k RMS(z - z_1)), R sqrt(1 + A))              starts at R / 200

    R is the tensor's root mean square at the start, or 1 / sqrt(inputs per output) if that is
    larger. k is 1, and up to 4 while the steps of the tensor agree. A is 0 unless the steps so far
    agree in every matrix of the model. eta is r / sqrt(t), but at most (1 + E) R / 60, where E is
    the sum of A^2 over the steps so far. See docs/untuned-rule.md.

    Call `opt.eval()` before you validate or save a model: it puts the average x into the
    parameters; `opt.train()` puts the iterate back. If the model has BatchNorm, call
    `recalibrate(model, batches)` after `eval()`. The constructor takes no `lr`. Each group has
    `lr`, 1.0, which a scheduler may multiply, and `factor`, 1.0, which you may lower to slow its
    layers down; both multiply the step.

    A gradient that is not finite raises `FloatingPointError`: on the CPU at once; on an
    accelerator, which skips the step without waiting, one step late. Pass hooks
    (`register_pass_hook`) get "before_step", "after_step" and "failed" (nothing has moved).

    Args:
        params: Parameters, parameter groups, or `named_parameters()`. A group may have its own
            `weight_decay`, `maximize` and `factor`.
        weight_decay: Decoupled, as AdamW's: each step also multiplies z by
            1 - weight_decay * eta / (R sqrt(inputs per output)), so that all tensors decay alike.
        maximize: Maximize the objective instead.
        state_dtype: torch.bfloat16 keeps the two buffers in 16 bits, stochastically rounded so that
            small changes count in the mean: half the memory. None: as the parameters, but
            at least float32.
        check_finite: Detect gradients that are not finite, before anything has moved.
    """

    _shared_initial: ClassVar[dict[str, float]] = {"grad_evaluations": 0.0, "skipped": 0.0}
    _tensor_initial: ClassVar[dict[str, float]] = {
        # `UntunedScalars.to_rows`, and the RMS of z - z_1.
        "step": 0.0,
        "step_size": 0.0,
        "distance": 0.0,
        "ceiling": 1.0,
        "effective_steps": 0.0,
        "effective_steps_lost": 0.0,
        "walk": rule.INITIAL_WALK,
        "evidence": 0.0,
        "displacement": 0.0,
    }
    _buffer_names = ("z_minus_x", "grad_rms", "initial_sample", "master")
    _copied_names = ("_state_dtype", "_compared", "_lr_checked")
    _step_supports_amp_scaling = True  # GradScaler sets `grad_scale` and `found_inf` around step()

    @reject_lr
    def __init__(
        self,
        params: Any,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        check_finite: bool = True,
    ) -> None:
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be torch.bfloat16 or None, got {state_dtype!r}")
        self._state_dtype = None if state_dtype == torch.float32 else state_dtype
        defaults = {"lr": 1.0, "factor": 1.0, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, check_finite=check_finite)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there, or that the closure computes.

        Returns:
            The closure's loss, or None.
        """
        if not (self._trainer_checked or torch.compiler.is_compiling()):
            check_trainer(self)
            self._trainer_checked = True
        loss = None
        if closure is not None and not self._shared_state["averaged"]:
            with torch.enable_grad():
                loss = closure()
        if self._shared_state["averaged"]:  # before the closure, or because of it
            raise RuntimeError(
                "step() called in eval mode; call opt.train() before the forward pass"
            )
        groups = self._tensor_groups()
        if groups:  # without any gradient, no step, as in torch.optim
            if self._pass_hooks:
                self._notify("before_step")
            self._update(groups)
            if self._pass_hooks:
                self._notify("after_step")
        return loss

    def _tensor_groups(self) -> list[TensorGroup]:
        """Sort the parameters that have a gradient by backend, device, dtype and shards."""
        groups = self._collect(missing_is_zero=False)
        for tensors in groups:
            tensors.z_minus_x = [state["z_minus_x"] for state in tensors.states]
            tensors.grad_rms = [state["grad_rms"] for state in tensors.states]
            tensors.initial_sample = [state["initial_sample"] for state in tensors.states]
            tensors.masters = [state["master"] for state in tensors.states if "master" in state]
            tensors.coordinates = [self._infos[i].coordinates for i in tensors.indices]
        return groups

    def _update(self, groups: list[TensorGroup]) -> None:
        """Compute the scalars of all tensors, and take the step."""
        table = self._tensor_table
        rows, xp, on_host = table.rows, table.xp, table.on_host
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is None:
            skip = self._check_gradients(groups)
        elif on_host:  # a GradScaler has looked for overflows, and expects no error
            if found_inf:
                return
            skip = None
        else:
            self._raise_if_skipped()
            skip = self._on_device(found_inf) > 0
        options = self._per_tensor_options()
        new_groups = [tensors for tensors in groups if tensors.is_new]
        if new_groups:
            self._start(new_groups, options.size, options.natural_scale)
        if self._compared != self.generation:
            self._compare_with_loaded(groups)
        # None if every tensor has a gradient.
        _, has_grad = table.select([*chain(*(tensors.indices for tensors in groups))])
        scalars = rule.UntunedScalars.from_rows(rows)
        # Non-finite values are caught by `_check_parameters`, now or in the next step.
        with np.errstate(all="ignore") if on_host else nullcontext():
            t, eta = scalars.step + 1.0, rule.next_step_size(scalars, xp)
            skip = self._check_parameters(rows["displacement"] + eta, has_grad, skip)
            alpha, decay, sign = options.lr * eta, options.weight_decay, options.sign
            if any(group["weight_decay"] for group in self.param_groups):
                natural = options.natural_scale
                decay = rule.decay_fraction(decay, alpha, natural, scalars.ceiling, xp)
            if scale is not None:
                sign = sign / (float(scale) if on_host else self._on_device(scale))
            coefficients = UntunedCoefficients(
                alpha=alpha,
                max_move=options.lr * scalars.distance,
                decay=decay,
                grad_weight=rule.grad_weight(t),
                average_weight=rule.average_weight(t),
                grad_factor=sign,
                step=t,
            )
            u_sq, displacement_sq = self._run_passes(groups, coefficients, skip)
            displacement = (displacement_sq / options.sample_count) ** 0.5
            if has_grad is not None:
                displacement = xp.where(has_grad, displacement, rows["displacement"])
            new = rule.after_step(
                scalars,
                step_size=eta,
                alpha=alpha,
                mean_square=u_sq / options.size,
                displacement=displacement,
                eligible=options.eligible,
                xp=xp,
            )
        if new_groups:
            self._mark_initialized(new_groups)
        mask = has_grad
        if skip is not None:
            mask = ~skip if has_grad is None else has_grad & ~skip
            self._count_skip(skip)
        table.write(new.to_rows() | {"displacement": displacement}, mask)
        self._shared_table.rows["grad_evaluations"] += 1.0 if skip is None else ~skip

    def _run_passes(
        self, groups: list[TensorGroup], coefficients: UntunedCoefficients, skip: Tensor | None
    ) -> tuple[Numbers, Numbers]:
        """Take the step, and return the sums of u^2 and of (z - z_1)^2 for each tensor."""
        table, parts = self._tensor_table, []
        for tensors in groups:
            of_these, flag = coefficients, skip
            index, mask = table.select(tensors.indices)
            if mask is not None or tensors.device != table.tensor.device:
                of_these = coefficients.of(index, tensors.device)
                flag = skip if skip is None else skip.to(tensors.device)
            sums = tensors.kernels.untuned_step(tensors, of_these, flag)
            if mask is not None or not table.on_host:
                sums = table.scatter(sums, tensors.indices)
            parts.append((tensors.process_groups, sums))
        u_sq, displacement_sq = self._total(parts)
        return u_sq, displacement_sq

    def _check_parameters(
        self, numbers: Numbers, has_grad: Any, skip: Tensor | None
    ) -> Tensor | None:
        """Raise, or on a device add to the flag, if a tensor is not finite or too far away.

        Its entry in `numbers`, the sum of its displacement and its step size, is not finite then.
        """
        on_host = self._tensor_table.on_host
        if not self._check_finite or (skip is None and not on_host):
            return skip
        if on_host and math.isfinite(sum(numbers.tolist())):  # a third of the time of NumPy
            return None
        nonfinite = ~self._tensor_table.xp.isfinite(numbers)
        if has_grad is not None:
            nonfinite &= has_grad
        if skip is not None:
            flag: Tensor = skip | nonfinite.any()
            return flag
        if nonfinite.any():
            name = parameter_name(self.param_groups, self._infos[nonfinite.argmax()].p)
            self._fail(
                f"{name} is non-finite, or its distance from initialization overflows; nothing "
                "has moved: go back to the last checkpoint"
            )
        return None

    def _per_tensor_options(self) -> _PerTensorOptions:
        """Return what is constant; it is uploaded again only if the groups have changed."""
        table, infos, groups = self._tensor_table, self._infos, self.param_groups
        lr_multiplies_later = [
            not (table.on_host or getattr(g["lr"], "is_cpu", True)) for g in groups
        ]
        lrs = [1.0 if later else float(g["lr"]) for g, later in zip(groups, lr_multiplies_later)]
        names = "factor", "weight_decay", "maximize"
        key = (
            *lrs,
            *[g[name] for g in groups for name in names],
            *[i.p.requires_grad for i in infos],
        )
        options = table.cache.get(key)
        if options is None:
            self._check_lr(lrs)
            group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
            of_groups = [[g[name] for g in groups] for name in names]
            factor, decay, maximize = np.array(of_groups, np.float64)[:, group_of]
            rates = np.array(lrs)[group_of] * factor
            arrays = table.upload(rates, decay, 1.0 - 2.0 * maximize)
            options = table.cache[key] = _PerTensorOptions(*arrays, *self._constants())
        for group in compress(groups, lr_multiplies_later):
            _, mask = table.select([i.index for i in infos if i.param_group is group])
            scaled = self._on_device(group["lr"]).to(options.lr) * options.lr
            rates = scaled if mask is None else torch.where(mask, scaled, options.lr)
            options = options._replace(lr=rates)
        return options

    def _constants(self) -> tuple[Numbers, ...]:
        """Return what does not depend on options, as the last fields of `_PerTensorOptions`."""
        table, params = self._tensor_table, self.parameters()
        key = "constants", *[p.requires_grad for p in params]
        if key not in table.cache:
            moves = [p.requires_grad and p.numel() > 0 for p in params]
            axes = [(p.ndim + p.is_complex()) * moving for p, moving in zip(params, moves)]
            table.cache[key] = table.upload(
                np.array(rule.eligible_tensors(axes)) & np.array(moves),
                np.array([max(1.0, p.numel() * (1 + p.is_complex())) for p in params]),
                np.array([max(1.0, coordinate_count(p)) for p in params]),
                np.array([rule.natural_scale(_inputs(p)) for p in params]),
            )
        return tuple(table.cache[key])

    def _on_device(self, number: Tensor) -> Tensor:
        return number.to(self._tensor_table.tensor.device, non_blocking=True).reshape(())

    def _start(self, groups: list[TensorGroup], size: Numbers, natural_scale: Numbers) -> None:
        """Let tensors that get their first gradient start from where they are."""
        table, parts = self._tensor_table, []
        for tensors in groups:
            squares = plain.new_sums(tensors, 1, len(tensors.params))
            for i, x in enumerate(tensors.params):
                squares[0, i] = plain.squared_norm(x)
                tensors.coordinates[i].store(x, tensors.initial_sample[i], tensors.process_groups)
            for x, master in zip(tensors.params, tensors.masters):
                master.copy_(x)
            parts.append((tensors.process_groups, table.scatter(squares, tensors.indices)))
        rms = (self._total(parts)[0] / size) ** 0.5
        ceiling = rule.distance_ceiling(rms, natural_scale, table.xp)
        indices = [*chain(*(tensors.indices for tensors in groups))]
        for i in indices if table.on_host else ():
            if not math.isfinite(ceiling[i]):
                name = parameter_name(self.param_groups, self._infos[i].p)
                self._fail(f"{name} is not finite; nothing has moved")
        _, mask = table.select(indices)
        table.write({"ceiling": ceiling, "distance": rule.initial_distance(ceiling)}, mask)

    # -- what the base class needs -----------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return {"rule": "Untuned", "state_dtype": str(self._state_dtype)}

    def _initial_flags(self) -> State:
        return {"averaged": 0}

    def _check_added(self, group: dict[str, Any]) -> None:
        lr = group["lr"]
        if lr in [1.0, *(g["lr"] for g in self.param_groups if g is not group)]:
            return
        if not self._infos:
            raise ValueError(f"a group of Untuned got lr={lr!r}: {NO_LR}")
        warn(  # a trainer's callback that unfreezes a backbone, at a tenth of the rest
            f"a group of Untuned was added with lr={float(lr):g}; lr is only a multiplier here "
            "(default 1.0)"
        )


def _inputs(p: Tensor) -> int:
    """Return how many numbers make up one output; of a vector, its length."""
    shape = (*p.shape, 2) if p.is_complex() else p.shape
    return math.prod(shape[1:] if len(shape) > 1 else shape)
