"""The optimizers that were tried on the way to `Untuned`: each differs from it in one respect.

The code is meant to be read, not to be fast. docs/untuned.md has what the variants did.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stormplus import Untuned
from stormplus.rules import (
    Sums,
    average_weight,
    first_distance,
    unit_weight,
    untuned_gain,
    untuned_step_size,
)
from stormplus_bench.train.steppers import AtAverage, Stepper, gradient_of
from stormplus_bench.train.training import Training

TINY = torch.finfo(torch.float32).tiny


class PlainUntuned(torch.optim.Optimizer):
    """`Untuned` in a few slow lines, with the places that the study changes as arguments.

    Without arguments it takes the steps of `Untuned`.

    Args:
        params: As of any torch optimizer.
        first_distance: r before any move, from the RMS of x_1.
        unit_weight: The weight of the t-th squared gradient in s^2.
        weighted: As in DoWG (Khaled, Mishchenko and Jin, 2023): eta = r_t^2 / sqrt(sum of r_i^2).
        signal: Multiply the step by the share of d that is signal, <d_t, g_{t+1}> / |d_t|^2. The
            product with a fresh gradient has the true gradient's product as its mean. Both are
            divided by s, and averaged over some twenty steps.
    """

    def __init__(
        self,
        params: Any,
        *,
        first_distance: Callable[[float], float] = first_distance,
        unit_weight: Callable[[int], float] = unit_weight,
        weighted: bool = False,
        signal: bool = False,
    ) -> None:
        super().__init__(params, {})
        self.first_distance, self.unit_weight = first_distance, unit_weight
        self.weighted, self.signal = weighted, signal
        self.t, self.r, self.sum_r_sq = 0, 0.0, 0.0
        self.product = self.square = 0.0  # means of <d, g> and of |d|^2, both over s

    def parameters(self) -> list[Tensor]:
        return [x for group in self.param_groups for x in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        xs = self.parameters()
        if self.t == 0:
            for x in xs:
                zeros = {name: torch.zeros_like(x) for name in ("estimator", "unit")}
                self.state[x] = zeros | {name: x.clone() for name in ("origin", "average")}
            self.r = self.first_distance(_rms(xs))
        self.t += 1
        share = self._share_of_signal() if self.signal else 1.0
        a, b = untuned_gain(self.t), self.unit_weight(self.t)
        for x in xs:
            d, s, g = self.state[x]["estimator"], self.state[x]["unit"], gradient_of(x)
            d.lerp_(g, a)
            torch.hypot(s * (1 - b) ** 0.5, g * b**0.5, out=s)
        self.r = max(self.r, _rms([x - self.state[x]["origin"] for x in xs]))
        self.sum_r_sq += self.r**2
        eta = untuned_step_size(self.r, self.t)
        if self.weighted:
            eta = self.r**2 / self.sum_r_sq**0.5
        for x in xs:
            d, s = self.state[x]["estimator"], self.state[x]["unit"]
            x.sub_(d / s.clamp_min(TINY) * (share * eta))
            self.state[x]["average"].lerp_(x, average_weight(self.t))
        return loss

    def _share_of_signal(self) -> float:
        self.product, self.square = 0.95 * self.product, 0.95 * self.square
        for x in self.parameters():
            d, s = self.state[x]["estimator"], self.state[x]["unit"]
            direction = d / s.clamp_min(1e-30)
            self.product += 0.05 * float((direction * gradient_of(x)).sum())
            self.square += 0.05 * float((direction * d).sum())
        return min(max(self.product / self.square, 0.0), 1.0) if self.square > 0 else 1.0

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
            x.copy_(state.pop("iterate"))


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
    """A diagonal metric as in `Untuned`, and a gain that is measured.

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
            x.sub_(d / p, alpha=untuned_step_size(self.r, self.t - 1))

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
        b = unit_weight(self.t)
        self.s_sq = [s_sq + b * (k * k - s_sq) for s_sq, k in zip(self.s_sq, g)]


def _square(tensors: list[Tensor], metric: list[Tensor] | None = None) -> float:
    """|v|^2, or the sum of v^2 over the metric."""
    if metric is None:
        return sum(float((v * v).sum()) for v in tensors)
    return sum(float((v * v / p).sum()) for v, p in zip(tensors, metric))


def _rms(tensors: list[Tensor]) -> float:
    return float((_square(tensors) / sum(v.numel() for v in tensors)) ** 0.5)


def _plain(**options: Any) -> Callable[[Training], Stepper]:
    return lambda training: AtAverage(PlainUntuned(training.model.parameters(), **options))


# By the names that the committed rows have.
VARIANTS: dict[str, Callable[[Training], Stepper]] = {
    "no average": lambda training: AtAverage(Untuned(training.model.parameters(), average=False)),
    "distance as in DoWG": _plain(weighted=True),
    "first distance x 10": _plain(first_distance=lambda start: 10 * first_distance(start)),
    "longer memory of s": _plain(unit_weight=lambda t: max(0.001, 1 / t)),
    "step times signal": _plain(signal=True),
    "corrected, s and r numbers": CorrectedUnits,
    "corrected, gain measured": MeasuredGain,
}
