"""What was tried on the way to STORM+ in measured units: each differs from it in one respect."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmark_utils.steppers import AtAverage, OneGradient, TwoGradients
from benchmark_utils.training import Training
from stormplus import Untuned
from stormplus.rules import Sums, UnitsRule, average_weight
from stormplus.torch.kernels import Batch


class LongMemory(Untuned):
    """The gradient unit is a mean over a thousand steps: nearer to AdaGrad."""

    memory = 0.001


class LargeStart(Untuned):
    """The first steps move every weight by a tenth of the weights' root mean square."""

    first_distance = 0.1


class _WeightedDistance(UnitsRule):
    """As in DoWG (Khaled, Mishchenko and Jin, 2023): eta = r_t^2 / sqrt(sum of r_i^2)."""

    def __call__(self, sums: Sums, g_sq: Any, d_sq: Any, t: Any, r: Any) -> tuple[Sums, Any, Any]:
        _, a, _ = super().__call__(sums, g_sq, d_sq, t, r)
        sum_r_sq = sums.sum_g_sq.plus(r**2)  # the place of a sum that this rule does not need
        return Sums(sum_r_sq, sums.sum_d_sq_over_a), a, r**2 / sum_r_sq.total**0.5


class WeightedDistance(Untuned):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.rule = _WeightedDistance()


class MeasuredSignal(Untuned):
    """The step is multiplied by the share of d that is signal, <d_t, g_{t+1}> / |d_t|^2.

    The product with a fresh gradient has the true gradient's product as its mean. Both are
    taken in the metric, and averaged over some twenty steps.
    """

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.signal, self.size = 0.0, 0.0

    def _learn(self, batch: Batch, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for state, d, g in zip(batch.states, batch.ds, batch.gs):
            direction = d / state["gradient_unit"].clamp_min(1e-30)
            self.signal += 0.05 * float((direction * g).sum())
            self.size += 0.05 * float((direction * d).sum())
        yield from super()._learn(batch, a, b)

    def _descend(self) -> None:
        self.signal, self.size = 0.95 * self.signal, 0.95 * self.size
        super()._descend()

    def _move_by(self, batch: Batch, eta: Tensor) -> None:
        share = min(max(self.signal / self.size, 0.0), 1.0) if self.size > 0 else 1.0
        super()._move_by(batch, eta * share)


class PairAtAverage(AtAverage, TwoGradients):
    """Two gradients a step, and measured at the average, as the others are."""


class MeasuredGain(TwoGradients):
    """Two gradients a step, corrected momentum in the diagonal metric, and a measured gain.

    The innovation |d - g~|^2 is V + sigma^2, V the estimator's error; the drift |g - g~|^2 bounds
    what a move adds to V. The gain of least variance is (V + drift) / (V + drift + sigma^2), a
    scalar Kalman gain. A tenth of its mean is added to the gradient unit, for where g is zero
    and d is not.
    """

    def __init__(self, training: Training) -> None:
        self.x = list(training.model.parameters())
        self.origin = [x.detach().clone() for x in self.x]
        self.average = [x.detach().clone() for x in self.x]
        self.n = sum(x.numel() for x in self.x)
        self.r = 0.01 * (_square(self.origin) / self.n) ** 0.5 or 0.01
        self.t, self.v, self.innovation, self.drift = 0, 0.0, 0.0, 0.0
        self.optimizer = torch.optim.SGD(self.x)  # holds no state: for the memory's account

    def step(self, training: Training) -> None:
        batch = training.draw()
        self.t += 1
        b = max(0.01, 1 / self.t)
        if self.t == 1:
            self.d = self._gradient(training, batch)
            self.s_sq = [d * d for d in self.d]
            return
        before = [buffer.clone() for buffer in training.model.buffers()]
        g_tilde = self._gradient(training, batch)
        for buffer, old in zip(training.model.buffers(), before):
            buffer.copy_(old)  # running statistics move once a sample
        with torch.no_grad():
            unit = [s_sq.sqrt() for s_sq in self.s_sq]
            floor = 0.1 * sum(float(s.sum()) for s in unit) / self.n + 1e-30
            metric = [s + floor for s in unit]
            moved = [x - o for x, o in zip(self.x, self.origin)]
            self.r = max(self.r, (_square(moved) / self.n) ** 0.5)
            for x, d, p in zip(self.x, self.d, metric):
                x.sub_(d / p, alpha=self.r / (self.t - 1) ** 0.5)
        g = self._gradient(training, batch)
        innovation = _square([d - h for d, h in zip(self.d, g_tilde)], metric)
        drift = _square([k - h for k, h in zip(g, g_tilde)], metric)
        keep = 0.9 if self.t > 2 else 0.0
        self.innovation = keep * self.innovation + (1 - keep) * innovation
        self.drift = keep * self.drift + (1 - keep) * drift
        self.v = self.v if self.t > 2 else innovation / 2
        noise = max(self.innovation - self.v, 0.1 * self.innovation)
        a = (self.v + self.drift) / (self.v + self.drift + noise + 1e-300)
        self.v = (1 - a) * (self.v + self.drift)
        self.d = [k + (1 - a) * (d - h) for k, d, h in zip(g, self.d, g_tilde)]
        self.s_sq = [s_sq + b * (k * k - s_sq) for s_sq, k in zip(self.s_sq, g)]
        for average, x in zip(self.average, self.x):
            average.lerp_(x.detach(), average_weight(self.t))

    def result(self, training: Training) -> nn.Module:
        model = copy.deepcopy(training.model)
        with torch.no_grad():
            for x, average in zip(model.parameters(), self.average):
                x.copy_(average)
        return model

    def _gradient(self, training: Training, batch: Any) -> list[Tensor]:
        training.gradient(batch)
        return [x.grad.clone() for x in self.x]


def _square(tensors: list[Tensor], metric: list[Tensor] | None = None) -> float:
    """|v|^2, or the sum of v^2 over the metric."""
    if metric is None:
        return sum(float((v * v).sum()) for v in tensors)
    return sum(float((v * v / p).sum()) for v, p in zip(tensors, metric))


def _optimizer(make: Callable[..., Any], **options: Any) -> Callable[[Training], Any]:
    def stepper(training: Training) -> Any:
        kind = PairAtAverage if options.get("correction") else AtAverage
        return kind(make(training.model.parameters(), **options))

    return stepper


VARIANTS: dict[str, Callable[[Training], OneGradient]] = {
    "no average": _optimizer(Untuned, average=False),
    "distance as in DoWG": _optimizer(WeightedDistance),
    "first distance x 10": _optimizer(LargeStart),
    "longer memory of s": _optimizer(LongMemory),
    "step times signal": _optimizer(MeasuredSignal),
    "corrected, s and r numbers": _optimizer(Untuned, correction=True),
    "corrected, gain measured": MeasuredGain,
}
