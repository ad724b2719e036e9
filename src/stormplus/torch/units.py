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

from stormplus.rules import FIRST_DISTANCE, MEMORY, CorrectedUnitsRule, UnitsRule, decaying
from stormplus.torch import state as states
from stormplus.torch import unit_passes
from stormplus.torch.averaging import AveragingOptimizer
from stormplus.torch.kernels import Batch
from stormplus.torch.memory import READY, START
from stormplus.torch.norms import Part, collect
from stormplus.torch.work import JOINED, Work, blame

_OF_A_PAIR = ("norm", "foreach", "fused", "replay_rng", "max_move")


class Untuned(AveragingOptimizer):
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
        lr: A factor on the step. Leave it at 1.0: r grows by the steps, and a smaller factor keeps
            it small. With a correction an r that is measured can run away at 1.0.
        correction: Pay a second gradient a step for the corrected momentum of the paper.
        distance: Fixes r, instead of measuring it from a hundredth of |x_1| on.
        gradient: Fixes s, instead of measuring it.
        average: Keep the average of the iterates; it never influences them.
        **options: `weight_decay`, `decoupled_weight_decay`, `maximize`, `scope` (whose
            parameters share r) and `check_finite`; with a correction every argument of
            `StormOptimizer`.
    """

    extra_scalars = states.UNIT_SCALARS
    first_distance = FIRST_DISTANCE
    memory = MEMORY

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
        self.pairs = correction
        self._refuse_useless(options)
        self.rule = CorrectedUnitsRule() if correction else UnitsRule()  # type: ignore[assignment]
        self._fixed = {"fixed_distance": distance, "fixed_gradient": gradient}
        units = ("origin",) if correction else ("origin", "gradient_unit")
        self.buffers = ("estimator", *units, *(("average",) if average else ()))
        super().__init__(params, lr, **options)

    def _make_room(self) -> None:
        super()._make_room()
        self._home.update({name: float(value or 0) for name, value in self._fixed.items()})
        self._home.setdefault("averaged", 0)
        self._home["keeps_average"] = "average" in self.buffers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; each takes d = g at its first gradient, and starts there."""
        self._refuse_useless(param_group)
        super().add_param_group(param_group)

    def _refuse_useless(self, options: dict[str, Any]) -> None:
        useless = [name for name in _OF_A_PAIR if options.get(name) is not None]
        if useless and not self.pairs:
            raise TypeError(
                f"{', '.join(useless)}: only with correction=True, which takes two gradients"
            )

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

    def __getstate__(self) -> dict[str, Any]:
        own = {"pairs": self.pairs, "buffers": self.buffers, "_fixed": self._fixed}
        return super().__getstate__() | own

    def diagnostics(self) -> dict[str, float]:
        """As `StormOptimizer.diagnostics`, and `distance`, the unit r (of several, the largest)."""
        return super().diagnostics() | {"distance": float(self._home["distance"].max())}

    @torch.no_grad()
    def _descend(self) -> None:
        home = self._home
        work = self._gather()
        if not any(batch.has_grad for batch, _ in work.batches()):
            raise RuntimeError("no parameter has a gradient: call loss.backward() before step()")
        if self._options.check_finite:
            probes = [part for batch, _ in work.batches() for part in batch.probes()]
            if not bool(torch.isfinite(collect([probes], work.process_groups, home["step"])).all()):
                raise FloatingPointError(
                    f"{blame(self.param_groups)}; nothing has moved: go on with another sample"
                )
        unit_passes.remember_origin(work)
        t = home["step"] + 1
        a, b = decaying(self.rule.gain, t), decaying(self.memory, t)  # type: ignore[attr-defined]
        g_parts: list[Part] = []
        d_parts: list[Part] = []
        first = home["phase"] == START
        home["phase"] = START  # a pass that is interrupted leaves no estimator
        for batch, joining in work.batches():
            again = first or joining
            weights = (
                torch.ones_like(a[0]) if again else a[batch.bucket],
                torch.ones_like(b[0]) if joining else b[batch.bucket],
            )
            for g_sq, d_sq in self._learn(batch, *weights):
                g_parts.append((batch.bucket, batch.process_groups, g_sq))
                d_parts.append((batch.bucket, batch.process_groups, d_sq))
        g_sq, d_sq, r_sq, start_sq = collect(
            [g_parts, d_parts, *unit_passes.distances(work)], work.process_groups, t
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

    def _learn(self, batch: Batch, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return unit_passes.learn(batch, a, b)

    def _move_by(self, batch: Batch, eta: Tensor) -> None:
        unit_passes.move(batch, eta, self._fixed["fixed_gradient"])

    def _measure_units(
        self, work: Work, g_sq: Tensor, size: Tensor | int
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The numbers r and s, for the paper's template."""
        unit_passes.remember_origin(work)
        r_sq, start_sq = collect(unit_passes.distances(work), work.process_groups, g_sq) / size
        r, fixed = self._distance(r_sq, start_sq), self._fixed["fixed_gradient"]
        largest = torch.maximum(self._home["gradient_scale"], g_sq.sqrt())
        s = largest + (largest == 0) if fixed is None else torch.full_like(largest, fixed)
        return (r, s), {"distance": r, "gradient_scale": largest}

    def _distance(self, r_sq: Tensor, start_sq: Tensor) -> Tensor:
        """r, from the mean squares (or squares) of x - x_1 and of x_1 itself."""
        r = self._home["distance"]
        if self._fixed["fixed_distance"] is not None:
            return torch.full_like(r, self._fixed["fixed_distance"])
        start = self.first_distance * (start_sq.sqrt() + (start_sq == 0))
        return torch.maximum(torch.where(r == 0, start, r), r_sq.sqrt())


def _positive(value: Any) -> bool:
    return isinstance(value, Real) and 0 < float(value) < math.inf
