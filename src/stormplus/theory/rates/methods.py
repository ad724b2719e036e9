"""The five methods of the rate experiment, on many runs at once.

A run is a row: arrays have the axes (noise level, seed, coordinate). The scalar rules are
the objects of `stormplus.rules`, called on arrays over (noise level, seed).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stormplus.rules import Rule, Sums
from stormplus.theory.problems.base import Array
from stormplus.theory.problems.bounded import BoundedNonConvex


class Method(Protocol):
    """A method that yields, for t = 1, 2, ..., the full gradient at x_t of every run."""

    def run(self, problem: BoundedNonConvex, x: Array, samples: Iterator[Any]) -> Iterator[Array]:
        """Start at x and draw one sample a step."""


def square_norm(v: Array) -> Array:
    """|v|^2 of each run."""
    result: Array = np.einsum("...i,...i->...", v, v)
    return result


@dataclass(frozen=True)
class CorrectedMomentum:
    """STORM+, simplified STORM+ and STORM: Algorithm 1 with one of the library's rules."""

    rule: Rule
    lr: float = 1.0

    def run(self, problem: BoundedNonConvex, x: Array, samples: Iterator[Any]) -> Iterator[Array]:
        xi = next(samples)
        slopes = problem.slopes(x)
        yield problem.height * slopes[0]
        d = g = problem.grad_from_slopes(slopes, xi)  # Alg. 1, line 1
        sums, t = Sums(), 1
        while True:
            sums, a, eta = self.rule(sums, square_norm(g), square_norm(d), t)  # Alg. 1, line 3
            x = x - (self.lr * eta)[..., None] * d  # Alg. 1, line 4
            xi, t = next(samples), t + 1
            g_tilde = problem.grad_from_slopes(slopes, xi)  # Alg. 1, line 5
            slopes = problem.slopes(x)
            g = problem.grad_from_slopes(slopes, xi)
            d = g + (1 - np.asarray(a)[..., None]) * (d - g_tilde)  # Alg. 1, line 6
            yield problem.height * slopes[0]


@dataclass(frozen=True)
class SGD:
    """x_{t+1} = x_t - lr g_t / sqrt(t); `lr` is a number, or an array over runs."""

    lr: Any

    def run(self, problem: BoundedNonConvex, x: Array, samples: Iterator[Any]) -> Iterator[Array]:
        lr, t = np.asarray(self.lr)[..., None], 0
        while True:
            slopes, t = problem.slopes(x), t + 1
            yield problem.height * slopes[0]
            x = x - lr / t**0.5 * problem.grad_from_slopes(slopes, next(samples))


@dataclass(frozen=True)
class AdaGradNorm:
    """x_{t+1} = x_t - lr g_t / sqrt(1 + sum_{i<=t} |g_i|^2): AdaGrad with one step size."""

    lr: float = 1.0

    def run(self, problem: BoundedNonConvex, x: Array, samples: Iterator[Any]) -> Iterator[Array]:
        total: Any = 1.0
        while True:
            slopes = problem.slopes(x)
            yield problem.height * slopes[0]
            g = problem.grad_from_slopes(slopes, next(samples))
            total = total + square_norm(g)
            x = x - (self.lr / np.sqrt(total))[..., None] * g


def storm_constants(smoothness: float, grad_bound: float, b: float) -> dict[str, float]:
    """STORM's constants, from Theorem 1 of Cutkosky & Orabona (2019), for a free b > 0.

    Their k, w and c are k = b G^(2/3) / L, c = 28 L^2 + G^2 / (7 L k^3) and
    w = max((4 L k)^3, 2 G^2, (c k / (4 L))^3); the rule here wants theta = k and c / L^2.
    """
    k = b * grad_bound ** (2 / 3) / smoothness
    c = 28 * smoothness**2 + grad_bound**2 / (7 * smoothness * k**3)
    w = max((4 * smoothness * k) ** 3, 2 * grad_bound**2, (c * k / (4 * smoothness)) ** 3)
    return {"theta": k, "w": w, "c": c / smoothness**2, "smoothness": smoothness}
