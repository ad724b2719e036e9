"""Beyond the paper: STORM+ in units that the run measures, for networks that nobody tunes.

The paper's formulas compare |g|^2 with 1 and move by 1 over a cube root: constants with units.
Here r is the distance unit, the largest distance from the start so far (as in DoG; Ivgi,
Hinder and Carmon, 2023), and s the gradient unit. docs/untuned.md has the study behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, _disable_dynamo  # type: ignore[attr-defined]

from stormplus.rules import CorrectedUnitsRule, UnitsRule, decaying
from stormplus.torch import state as states
from stormplus.torch.averaging import AveragingOptimizer
from stormplus.torch.kernels import BLOCK, Batch
from stormplus.torch.memory import READY, START
from stormplus.torch.norms import Part, blocks, collect, square_norm
from stormplus.torch.sharding import local
from stormplus.torch.work import JOINED, Work, blame, gather

FIRST_DISTANCE = 0.01  # r before any move, relative to |x_1|: results hardly depend on it
MEMORY = 0.01  # the last weight in the mean of g^2: about a hundred gradients

_OF_A_PAIR = ("norm", "foreach", "fused", "replay_rng", "max_move")


class StormPlusUnits(AveragingOptimizer):
    """STORM+ in measured units: no learning rate to find, and one gradient a step.

    With n elements and, in each coordinate, g the gradient:

        r     <- max(r, |x - x_1| / sqrt(n))             distance unit, one number
        s^2   <- mean of g^2 over some hundred steps     gradient unit, a coordinate's own
        d     <- d + a (g - d),  a = max(0.1, 1/t)       the estimator, where g~ is taken as g
        x     <- x - lr (r / sqrt(t)) d / s
        average <- mean of x over about the last tenth of the run

    It is a plain torch optimizer: `loss.backward(); opt.step()`, a closure if you like, any
    trainer, no second evaluation. `opt.eval()` puts the average into the parameters, to
    validate or to save a model, and `opt.train()` takes it out again.

    `correction=True` is the paper's template with two gradients a step (see `StormOptimizer`)
    and numbers for r and s, one for all coordinates: `a = (1 + sum |g|^2 / s^2)^(-2/3)`,
    `eta = r s^(-1/3) (sum |d|^2 / a)^(-1/3)`, where s is the largest |g| so far. With
    `distance=1, gradient=1` that is `StormPlus`, number for number.

    Memory: four buffers of the parameters' size (d, s, x_1, the average), Adam has two.

    Args:
        params: Parameters, parameter groups, or `named_parameters()`.
        lr: A factor on the step. 1.0 needs no tuning; a schedule works as for any optimizer.
        correction: Pay a second gradient a step for the corrected momentum of the paper.
        distance: Fixes r, instead of measuring it from a hundredth of |x_1| on.
        gradient: Fixes s, instead of measuring it.
        average: Keep the average of the iterates; it never influences them.
        **options: `weight_decay`, `decoupled_weight_decay`, `maximize`, `scope` (whose
            parameters share r) and `check_finite`; with a correction every argument of
            `StormOptimizer`.
    """

    extra_scalars = states.UNIT_SCALARS

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        correction: bool = False,
        distance: float | None = None,
        gradient: float | None = None,
        average: bool = True,
        **options: Any,
    ) -> None:
        for name, value in (("distance", distance), ("gradient", gradient)):
            if value is not None and not _positive(value):
                raise ValueError(
                    f"{name} must be a positive number, or None to measure it, got {value!r}"
                )
        useless = [name for name in _OF_A_PAIR if name in options]
        if useless and not correction:
            raise TypeError(
                f"{', '.join(useless)}: only with correction=True, which takes two gradients"
            )
        self.pairs = correction
        self.rule = CorrectedUnitsRule() if correction else UnitsRule()  # type: ignore[assignment]
        self._fixed = {"fixed_distance": distance, "fixed_gradient": gradient}
        units = ("origin",) if correction else ("origin", "gradient_unit")
        self.buffers = ("estimator", *units, *(("average",) if average else ()))
        super().__init__(params, lr, **options)

    def _make_room(self) -> None:
        super()._make_room()
        self._home.update({name: float(value or 0) for name, value in self._fixed.items()})
        self._home.setdefault("averaged", 0)

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients that are there, or that the closure computes.

        Args:
            closure: Optional. With `correction=True` required, and called twice: see
                `StormOptimizer.step`.

        Returns:
            The closure's loss, or None.
        """
        self._refuse_at_average()
        if self.pairs:
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._descend()
        return loss

    def move(self) -> None:
        """With `correction=True`: the first half of a step, see `StormOptimizer.move`."""
        self._refuse_single("move()")
        super().move()

    def estimate(self) -> None:
        """With `correction=True`: the second half of a step, see `StormOptimizer.estimate`."""
        self._refuse_single("estimate()")
        super().estimate()

    def _refuse_single(self, what: str) -> None:
        self._refuse_at_average()
        if not self.pairs:
            raise RuntimeError(
                f"{what} is half of a pair of gradients: without a correction call step()"
            )

    def diagnostics(self) -> dict[str, float]:
        """As `StormOptimizer.diagnostics`, and `distance`, the unit r (of several, the largest)."""
        return super().diagnostics() | {"distance": float(self._home["distance"].max())}

    @torch.no_grad()
    def _descend(self) -> None:
        home = self._home
        work = gather(self.param_groups, self.state, home, self._options)
        if not any(work.active):
            raise RuntimeError("no parameter has a gradient: call loss.backward() before step()")
        if self._options.check_finite:
            probes = [part for batch, _ in work.batches() for part in batch.probes()]
            if not bool(torch.isfinite(collect([probes], work.process_groups, home["step"])).all()):
                raise FloatingPointError(
                    f"{blame(self.param_groups)}; nothing has moved: go on with another sample"
                )
        self._remember_origin(work)
        t = home["step"] + 1
        a, b = decaying(self.rule.gain, t), decaying(MEMORY, t)  # type: ignore[attr-defined]
        g_parts: list[Part] = []
        d_parts: list[Part] = []
        for batch, joining in work.batches():
            again = joining or home["phase"] == START
            weights = (
                torch.ones_like(a[0]) if again else a[batch.bucket],
                torch.ones_like(b[0]) if joining else b[batch.bucket],
            )
            for g_sq, d_sq in self._learn(batch, *weights):
                g_parts.append((batch.bucket, batch.process_groups, g_sq))
                d_parts.append((batch.bucket, batch.process_groups, d_sq))
        g_sq, d_sq, r_sq, start_sq = collect(
            [g_parts, d_parts, *self._distances(work)], work.process_groups, t
        )
        size = torch.tensor(work.sizes).to(t)
        r = self._distance(r_sq / size, start_sq / size)
        sums, gain, eta = self.rule(states.get_sums(home), g_sq, d_sq, t, r)  # type: ignore[call-arg]
        new = states.set_sums(sums) | {"step": t, "gain": gain, "step_size": eta, "distance": r}
        new |= {"grad_norm_sq": g_sq, "estimator_norm_sq": d_sq}
        active = torch.tensor(work.active).to(t.device)
        home.update({name: torch.where(active, value, home[name]) for name, value in new.items()})
        for batch, _ in work.batches():
            self._move_by(batch, eta[batch.bucket])
        for state in work.newcomers:
            state["joined"] = JOINED
        self._update_average(work)
        self._advance(READY)
        self._opt_called = True  # what lr_scheduler looks for before it warns

    def _learn(self, batch: Batch, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Update d by a (g - d), and s to the root of (1 - b) s^2 + b g^2; |g|^2 and |d|^2."""
        a, b = (weight.to(batch.ds[0].device, batch.ds[0].dtype) for weight in (a, b))
        for x, d, g_raw, s in _pieces(batch, "gradient_unit"):
            g = batch.gradient(x, g_raw)
            g = torch.zeros_like(d) if g is None else g
            d.lerp_(g, a)
            torch.hypot(s * (1 - b).sqrt(), g * b.sqrt(), out=s)  # squares would leave float32
            yield square_norm(g), square_norm(d)

    def _move_by(self, batch: Batch, eta: Tensor) -> None:
        """Move: x <- x - lr eta d / s, where 0/0 is 0."""
        alpha = (batch.lr * eta).to(batch.ds[0].device, batch.ds[0].dtype)
        fixed = self._fixed["fixed_gradient"]
        for x, d, _, s in _pieces(batch, "gradient_unit"):
            step = d / (s.clamp_min(torch.finfo(s.dtype).tiny) if fixed is None else fixed)
            if batch.decoupled:
                step.add_(x, alpha=batch.decoupled)
            x.sub_((step * alpha).to(x.dtype))

    def _next_scalars(self, squares: Tensor, work: Work) -> dict[str, Tensor]:
        """Alg. 1, line 3, in units: what the template of the paper asks for."""
        self._remember_origin(work)
        g_sq, d_sq = squares
        size: Tensor = torch.ones_like(g_sq)
        if self._options.norm == "mean":
            size = torch.tensor(work.sizes).to(g_sq)
        r_sq, start_sq = collect(self._distances(work), work.process_groups, g_sq) / size
        r, fixed = self._distance(r_sq, start_sq), self._fixed["fixed_gradient"]
        largest = torch.maximum(self._home["gradient_scale"], (g_sq / size).sqrt())
        s = largest + (largest == 0) if fixed is None else torch.full_like(largest, fixed)
        t = self._home["step"] + 1
        sums, a, eta = self.rule(states.get_sums(self._home), g_sq / size, d_sq / size, t, r, s)  # type: ignore[call-arg]
        return states.set_sums(sums) | {
            "step": t,
            "gain": a,
            "step_size": eta,
            "grad_norm_sq": g_sq,
            "estimator_norm_sq": d_sq,
            "distance": r,
            "gradient_scale": largest,
        }

    def _remember_origin(self, work: Work) -> None:
        for batch in work.joining.values():
            for x, state in zip(batch.xs, batch.states):
                local(state["origin"]).copy_(x)
                if "average" in state:
                    local(state["average"]).copy_(x)

    def _distances(self, work: Work) -> list[list[Part]]:
        """The parts of |x - x_1|^2, and those of |x_1|^2 of the parameters that join."""
        moved: list[Part] = []
        start: list[Part] = []
        for batch, joining in work.batches():
            for x, state in zip(batch.xs, batch.states):
                for x_, origin in blocks(BLOCK, x, local(state["origin"])):
                    part = square_norm(x_) if joining else square_norm(x_ - origin)
                    (start if joining else moved).append((batch.bucket, batch.process_groups, part))
        return [moved, start]

    def _distance(self, r_sq: Tensor, start_sq: Tensor) -> Tensor:
        """r, from the mean squares (or squares) of x - x_1 and of x_1 itself."""
        r = self._home["distance"]
        if self._fixed["fixed_distance"] is not None:
            return torch.full_like(r, self._fixed["fixed_distance"])
        start = FIRST_DISTANCE * (start_sq.sqrt() + (start_sq == 0))
        return torch.maximum(torch.where(r == 0, start, r), r_sq.sqrt())


def _positive(value: Any) -> bool:
    return isinstance(value, Real) and 0 < float(value) < math.inf


def _pieces(batch: Batch, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """As `Batch.pieces`, with another buffer beside."""
    for i, (x, d) in enumerate(zip(batch.xs, batch.ds)):
        if x.numel() == 0:
            continue
        buffer = local(batch.states[i][name])
        if batch.has_grad:
            yield from blocks(BLOCK, x, d, batch.gs[i], buffer)  # type: ignore[misc]
        else:
            yield from ((x_, d_, None, b_) for x_, d_, b_ in blocks(BLOCK, x, d, buffer))
