"""The optimizers that were tried on the way to `Untuned`: each differs from it in one respect.

The code is meant to be read, not to be fast. docs/untuned.md has what the variants did. The method
that `Untuned` was before, with four buffers, is here as well, and two methods with its
formulas and a corrected estimator.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stormplus import rules
from stormplus.rules import INTERPOLATION, Sums, average_weight
from stormplus_bench.train.steppers import AtAverage, Stepper, gradient_of
from stormplus_bench.train.training import Training

TINY = torch.finfo(torch.float32).tiny
FAR = 1e300  # a bound that is none; infinity times False would be nan


class _WithAverage(torch.optim.Optimizer):
    """An optimizer whose state has an "average" to hand out."""

    def parameters(self) -> list[Tensor]:
        return [x for group in self.param_groups for x in group["params"]]

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters."""
        for x, state in self.state.items():
            state["iterate"] = x.clone()
            x.copy_(state["average"])

    @torch.no_grad()
    def train(self) -> None:
        """Put the last iterate back."""
        for x, state in self.state.items():
            if "iterate" in state:
                x.copy_(state.pop("iterate"))


class PlainUntuned(_WithAverage):
    """`Untuned` in a few slow lines, with the places that the study changes as arguments.

    Without arguments it takes the steps of `Untuned`; but it measures the distance on every
    coordinate, where that takes a sample of them.

    Args:
        params: As of any torch optimizer; all must have a gradient in every step.
        ceiling: Whether r stays below the tensor's scale.
        one_distance: Whether all tensors share one r, one scale and one count of steps: the root
            mean squares over all coordinates.
        unit_weight: The weight of the t-th squared gradient in s^2.
        clamp: Between -clamp and clamp lies g / s.
        bounded: Whether a step is at most a part of the tensor's scale, and of a coordinate r.
        fixed: Whether that part stays as it is, however well the steps agree.
    """

    def __init__(
        self,
        params: Any,
        *,
        ceiling: bool = True,
        one_distance: bool = False,
        unit_weight: Callable[[int], float] = rules.unit_weight,
        clamp: float = math.inf,
        bounded: bool = True,
        fixed: bool = False,
    ) -> None:
        super().__init__(params, {})
        self.ceiling, self.one_distance, self.bounded = ceiling, one_distance, bounded
        self.fixed = fixed
        self.unit_weight, self.clamp = unit_weight, clamp
        self.t = 0
        self.scale: list[float] = []  # of each tensor, as are r and the steps that count
        self.r: list[float] = []
        self.counted: list[float] = []
        self.walk: list[float] = []
        self.evidence: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        ys = self.parameters()
        if self.t == 0:
            self._start(ys)
        self.t += 1
        w, c, b = self.unit_weight(self.t), average_weight(self.t), INTERPOLATION
        squares, moved = [], []
        for i, y in enumerate(ys):
            state, g = self.state[y], gradient_of(y)
            z, x, s = state["fast"], state["average"], state["unit"]
            torch.hypot(s * (1 - w) ** 0.5, g * w**0.5, out=s)
            u = (g / s.clamp_min(TINY)).clamp(-self.clamp, self.clamp)
            bound = self.scale[i] if self.bounded else FAR
            eta = rules.untuned_step_size(self.r[i], self.counted[i], bound, self.evidence[i])
            limit = self.r[i] if self.bounded else math.inf
            z.sub_((eta * u).clamp(-limit, limit))
            x.lerp_(z, c)
            y.copy_((1 - b) * z + b * x)
            squares.append(_rms([u]))
            moved.append(_rms([z - state["origin"]]))
            self.walk[i] += (eta * squares[i] / self.scale[i]) ** 2
        for i, (square, distance) in enumerate(zip(self._shared(squares), self._shared(moved))):
            self.counted[i] += rules.counted_step(square**2)
            ceiling = self.scale[i] if self.ceiling else FAR
            self.r[i] = rules.next_distance(self.r[i], distance, ceiling)
        least = 0.0 if self.fixed else self._least_agreement(ys, moved)
        for i, square in enumerate(squares):
            self.evidence[i] += rules.counted_step(square**2) * least**2
        return loss

    def _start(self, ys: list[Tensor]) -> None:
        scale = []
        for y in ys:
            copies = {name: y.detach().clone() for name in ("fast", "average", "origin")}
            self.state[y] = copies | {"unit": torch.zeros_like(y)}
            natural = rules.natural_scale(y[0].numel() if y.ndim > 1 else y.numel())
            scale.append(rules.distance_ceiling(_rms([y]), natural))
        self.scale = self._shared(scale)
        self.r = [rules.first_distance(size) for size in self.scale]
        self.counted, self.evidence = [0.0] * len(ys), [0.0] * len(ys)
        self.walk = [rules.FIRST_WALK] * len(ys)

    def _least_agreement(self, ys: list[Tensor], moved: list[float]) -> float:
        relative = np.array(moved) / np.array(self.scale)
        asked = np.array(rules.asked([y.ndim for y in ys]))
        return float(rules.least_agreement(relative, np.array(self.walk), asked))

    def _shared(self, sizes: list[float]) -> list[float]:
        """Root mean squares of the tensors, or for each the one of all their coordinates."""
        if not self.one_distance:
            return sizes
        counts = [y.numel() for y in self.parameters()]
        total = sum(n * size**2 for n, size in zip(counts, sizes))
        return [math.sqrt(total / sum(counts))] * len(sizes)


def first_distance(start: float) -> float:
    """Of four buffers: r before any move, from the RMS of x_1; zeros tell no scale."""
    return 0.01 * (start or 1.0)


def forgetting(last: float, t: int) -> float:
    """Of four buffers: the weight of the t-th value in a mean that comes to forget."""
    return max(last, 1 / t)


class FourBuffers(_WithAverage):
    """What `Untuned` was before: an estimator d, one r for all tensors, no ceiling.

    r    = the largest RMS of x - x_1 so far, from 0.01 RMS(x_1) on
    s^2 <- mean of g^2 over the last hundred steps or so
    d   <- d + a (g - d),  a = max(0.1, 1/t)
    x   <- x - (r / sqrt(t)) d / s          handed out is the average of the x, as t^8
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.t, self.r = 0, 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        xs = self.parameters()
        if self.t == 0:
            for x in xs:
                zeros = {name: torch.zeros_like(x) for name in ("estimator", "unit")}
                self.state[x] = zeros | {name: x.clone() for name in ("origin", "average")}
            self.r = first_distance(_rms(xs))
        self.t += 1
        a, b = forgetting(0.1, self.t), forgetting(0.01, self.t)
        for x in xs:
            d, s, g = self.state[x]["estimator"], self.state[x]["unit"], gradient_of(x)
            d.lerp_(g, a)
            torch.hypot(s * (1 - b) ** 0.5, g * b**0.5, out=s)
        self.r = max(self.r, _rms([x - self.state[x]["origin"] for x in xs]))
        for x in xs:
            d, s = self.state[x]["estimator"], self.state[x]["unit"]
            x.sub_(d / s.clamp_min(TINY) * (self.r / self.t**0.5))
            self.state[x]["average"].lerp_(x, average_weight(self.t))
        return loss


class Corrected(Stepper):
    """Two gradients a step and the corrected estimator of STORM+; handed out is the average."""

    price = 2

    def __init__(self, training: Training) -> None:
        self.x = list(training.model.parameters())
        self.origin = [x.detach().clone() for x in self.x]
        self.average = [x.detach().clone() for x in self.x]
        self.d: list[Tensor] = []
        self.t = 0

    def step(self, training: Training) -> None:
        sample = training.draw()
        self.t += 1
        if self.t == 1:
            self.d = self._gradient(training, sample)
            self._learn(self.d, [])
        else:
            before = [buffer.clone() for buffer in training.model.buffers()]
            g_tilde = self._gradient(training, sample)
            for buffer, old in zip(training.model.buffers(), before):
                buffer.copy_(old)  # running statistics move once a sample
            with torch.no_grad():
                self._move()
            self._learn(self._gradient(training, sample), g_tilde)
        for average, x in zip(self.average, self.x):
            average.lerp_(x.detach(), average_weight(self.t))

    @abstractmethod
    def _move(self) -> None:
        """Take the iterate one step on."""

    @abstractmethod
    def _learn(self, g: list[Tensor], g_tilde: list[Tensor]) -> None:
        """Update the estimator and the coefficients; on the first sample there is no g~."""

    def _gradient(self, training: Training, sample: Any) -> list[Tensor]:
        training.gradient(sample)
        return [gradient_of(x).clone() for x in self.x]

    def _moved(self) -> list[Tensor]:
        return [x.detach() - origin for x, origin in zip(self.x, self.origin)]

    def result(self, training: Training) -> nn.Module:
        model = copy.deepcopy(training.model)
        with torch.no_grad():
            for x, average in zip(model.parameters(), self.average):
                x.copy_(average)
        return model

    @property
    def state_mb(self) -> float:
        return sum(t.nbytes for t in (*self.origin, *self.average, *self.d)) / 2**20


@dataclass(frozen=True)
class CorrectedUnitsRule:
    """STORM+ in the units r and s, both numbers; with r = s = 1 it is Algorithm 1."""

    def __call__(  # noqa: PLR0917 - the arguments of the library's rules, and two units
        self, sums: Sums, g_sq: float, d_sq: float, t: int, r: float, s: float
    ) -> tuple[Sums, float, float]:
        sum_g_sq = sums.sum_g_sq.plus(g_sq)
        a = (1 + sum_g_sq.total / s**2) ** (-2 / 3)  # Alg. 1, line 3, left, |g| in units of s
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)
        # Alg. 1, line 3, right, in units of r and s
        eta = r * s ** (-1 / 3) * (sum_d_sq_over_a.total or 1.0) ** (-1 / 3)
        return Sums(sum_g_sq, sum_d_sq_over_a), a, eta


class CorrectedUnits(Corrected):
    """The paper's formulas, where r is the largest |x - x_1| so far and s the largest |g|."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.rule, self.sums = CorrectedUnitsRule(), Sums()
        self.r, self.s = first_distance(_square(self.origin) ** 0.5), 0.0
        self.a = self.eta = 0.0

    def _move(self) -> None:
        for x, d in zip(self.x, self.d):
            x.sub_(d, alpha=self.eta)  # Alg. 1, line 4

    def _learn(self, g: list[Tensor], g_tilde: list[Tensor]) -> None:
        if g_tilde:  # Alg. 1, line 6
            self.d = [k + (1 - self.a) * (d - h) for k, d, h in zip(g, self.d, g_tilde)]
        self.r = max(self.r, _square(self._moved()) ** 0.5)
        g_sq, d_sq = _square(g), _square(self.d)
        self.s = max(self.s, g_sq**0.5)
        self.sums, self.a, self.eta = self.rule(
            self.sums, g_sq, d_sq, self.t, self.r, self.s or 1.0
        )


class MeasuredGain(Corrected):
    """A diagonal metric, as with four buffers, and a gain that is measured.

    The innovation |d - g~|^2 is V + sigma^2, V the estimator's error; the drift |g - g~|^2 bounds
    what a move adds to V. The gain of least variance is (V + drift) / (V + drift + sigma^2), a
    scalar Kalman gain. A tenth of its mean is added to the unit s, for where g is zero and d is
    not.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.n = sum(x.numel() for x in self.x)
        self.r = first_distance(_rms(self.origin))
        self.v = self.innovation = self.drift = 0.0
        self.s_sq: list[Tensor] = []
        self.metric: list[Tensor] = []

    def _move(self) -> None:
        unit = [s_sq.sqrt() for s_sq in self.s_sq]
        floor = 0.1 * sum(float(s.sum()) for s in unit) / self.n + 1e-30
        self.metric = [s + floor for s in unit]
        self.r = max(self.r, _rms(self._moved()))
        for x, d, p in zip(self.x, self.d, self.metric):
            x.sub_(d / p, alpha=self.r / (self.t - 1) ** 0.5)

    def _learn(self, g: list[Tensor], g_tilde: list[Tensor]) -> None:
        if not g_tilde:
            self.s_sq = [k * k for k in g]
            return
        innovation = _square([d - h for d, h in zip(self.d, g_tilde)], self.metric)
        drift = _square([k - h for k, h in zip(g, g_tilde)], self.metric)
        keep = 0.9 if self.t > 2 else 0.0
        self.innovation = keep * self.innovation + (1 - keep) * innovation
        self.drift = keep * self.drift + (1 - keep) * drift
        self.v = self.v if self.t > 2 else innovation / 2
        noise = max(self.innovation - self.v, 0.1 * self.innovation)
        a = (self.v + self.drift) / (self.v + self.drift + noise + 1e-300)
        self.v = (1 - a) * (self.v + self.drift)
        self.d = [k + (1 - a) * (d - h) for k, d, h in zip(g, self.d, g_tilde)]
        b = forgetting(0.01, self.t)
        self.s_sq = [s_sq + b * (k * k - s_sq) for s_sq, k in zip(self.s_sq, g)]


def _square(tensors: list[Tensor], metric: list[Tensor] | None = None) -> float:
    """|v|^2, or the sum of v^2 over the metric."""
    if metric is None:
        return sum(float((v * v).sum()) for v in tensors)
    return sum(float((v * v / p).sum()) for v, p in zip(tensors, metric))


def _rms(tensors: list[Tensor]) -> float:
    return float((_square(tensors) / sum(v.numel() for v in tensors)) ** 0.5)


def _plain(**options: Any) -> Callable[[Training], Stepper]:
    return lambda training: AtAverage(PlainUntuned(training.parameters, **options))


# By the names that the committed rows have.
VARIANTS: dict[str, Callable[[Training], Stepper]] = {
    "four buffers": lambda training: AtAverage(FourBuffers(training.parameters)),
    "no ceiling": _plain(ceiling=False),
    "one r for all tensors": _plain(one_distance=True),
    "s over a hundred steps, clamped": _plain(unit_weight=lambda t: forgetting(0.01, t), clamp=5),
    "no bound on a step": _plain(bounded=False),
    "no step above the first": _plain(fixed=True),
    "corrected, s and r numbers": CorrectedUnits,
    "corrected, gain measured": MeasuredGain,
}
