"""Variance-reduction methods for `finite_sum.py`, to be read beside their papers.

A method is a generator that yields the iterate after each move. Every gradient of every data
point is counted, also those of anchors and mega-batches; STORM+ with batches of b pays 2b per step.

| method         | estimator; x', v' are those of the last step | what it needs                   |
|----------------|----------------------------------------------|---------------------------------|
| `svrg`         | g_i(x) - g_i(anchor) + full(anchor)          | L, n; a full pass per anchor    |
| `scsg`         | the same, the anchor's mean over B_j points  | L; mega-batches that grow       |
| `spider`       | v' + g_S(x) - g_S(x')                        | L, n, the accuracy; full passes |
| `hybrid-sarah` | b (v' + g_i(x) - g_i(x')) + (1 - b) g_j(x)   | L, the horizon; one mega-batch  |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult

from stormplus.theory.problems.base import Array, FiniteSum

Indices = NDArray[np.int64]


class BudgetSpent(Exception):
    """The next gradient would exceed the budget."""


@dataclass
class CountedGradients:
    """Gradients of a finite sum; counts one per data point and raises `BudgetSpent`.

    `step_size` is None for that of the method's theory.
    """

    problem: FiniteSum
    budget: int
    rng: np.random.Generator
    step_size: float | None = None
    spent: int = 0

    def __post_init__(self) -> None:
        self.n = self.problem.n_samples
        self.smoothness = self.problem.constants.smoothness

    def draw(self, size: int) -> Indices:
        return self.problem.sample(self.rng, size)

    def grad(self, x: Array, xi: Indices, price: int = 1) -> Array:
        if self.spent + price * len(xi) > self.budget:
            raise BudgetSpent
        self.spent += len(xi)
        return self.problem.grad(x, xi)

    def full(self, x: Array) -> Array:
        return self.grad(x, self.problem.full_sample)

    def difference(self, x: Array, other: Array, xi: Indices) -> Array:
        """Return g_S(x) - g_S(other): two gradients per data point, or none."""
        return self.grad(x, xi, price=2) - self.grad(other, xi)


def svrg(f: CountedGradients, x: Array, batch_size: int = 1) -> Iterator[Array]:
    """SVRG for non-convex sums (Reddi et al. 2016; Allen-Zhu & Hazan 2016).

    Theory: step size mu / (L n^(2/3)) and n / (3 mu) inner steps, batches of 1. Theorem 2 of Reddi
    et al. needs Gamma > 0; with mu = 1/4 and n = 569, Gamma L n^(2/3) is at least 0.224.
    """
    mu = 0.25
    eta = f.step_size or mu / (f.smoothness * f.n ** (2 / 3))
    inner = max(1, int(f.n / (3 * mu) / batch_size))
    while True:
        anchor, mean = x, f.full(x)
        for _ in range(inner):
            x = x - eta * (f.difference(x, anchor, f.draw(batch_size)) + mean)
            yield x


def scsg(f: CountedGradients, x: Array, batch_size: int = 1) -> Iterator[Array]:
    """SCSG (Lei et al. 2017): mega-batches of B_j points, a geometric number of steps.

    Theory: B_j = min(j^(3/2), n), at least 8 batches; step size gamma (b / B_j)^(2/3) / L with
    gamma = 1/3, as in the paper. A tuned `step_size` replaces gamma / L.
    """
    scale = f.step_size or 1 / (3 * f.smoothness)
    j = 0
    while True:
        j += 1
        size = min(max(math.ceil(j**1.5), 8 * batch_size), f.n)
        anchor, mean = x, f.grad(x, f.rng.choice(f.n, size, replace=False))
        eta = scale * (batch_size / size) ** (2 / 3)
        # The number of failures before a success of probability b / (B + b): mean B / b.
        for _ in range(f.rng.geometric(batch_size / (size + batch_size)) - 1):
            x = x - eta * (f.difference(x, anchor, f.draw(batch_size)) + mean)
            yield x


def spider(
    f: CountedGradients, x: Array, batch_size: int | None = None, *, accuracy: float = 1e-2
) -> Iterator[Array]:
    """SPIDER-SFO (Fang et al. 2018), finite-sum case with the paper's n_0 = 1.

    Theory: batches of sqrt(n), a full pass every sqrt(n) steps, a move of length at most
    accuracy / L: step size min(accuracy / (L |v|), 1 / (2 L)). A tuned `step_size` is constant.
    """
    root = max(1, round(math.sqrt(f.n)))
    previous = x
    while True:
        v = f.full(x)
        for k in range(root):
            if k > 0:
                v = v + f.difference(x, previous, f.draw(batch_size or root))
            length = float(np.linalg.norm(v))
            eta = f.step_size or min(0.5, accuracy / max(length, accuracy)) / f.smoothness
            previous, x = x, x - eta * v
            yield x


def hybrid_sarah(f: CountedGradients, x: Array, batch_size: int = 1) -> Iterator[Array]:
    """The hybrid SARAH-SGD estimator with one loop (Tran-Dinh et al. 2019).

    v <- beta (v + g_i(x) - g_i(x_previous)) + (1 - beta) g_j(x), i and j independent:
    three gradients per step. Theory, for a horizon of m steps: a first mega-batch of
    (m + 1)^(1/3) points, beta = 1 - 1 / sqrt(mega (m + 1)), and the largest step size with
    1 - L eta - (L eta alpha)^2 >= 0, alpha^2 = beta^2 (1 - beta^(2m)) / (1 - beta^2).
    """
    horizon = max(1, f.budget // (3 * batch_size))
    mega = min(math.ceil((horizon + 1) ** (1 / 3)), f.n)
    beta = 1 - 1 / math.sqrt(mega * (horizon + 1))
    alpha_sq = beta**2 * (1 - beta ** (2 * horizon)) / (1 - beta**2)
    eta = f.step_size or 2 / (f.smoothness * (1 + math.sqrt(1 + 4 * alpha_sq)))
    v = f.grad(x, f.draw(mega))
    while True:
        previous, x = x, x - eta * v
        yield x
        drift = f.difference(x, previous, f.draw(batch_size))
        v = beta * (v + drift) + (1 - beta) * f.grad(x, f.draw(batch_size))


METHODS: dict[str, Callable[..., Iterator[Array]]] = {
    "svrg": svrg,
    "scsg": scsg,
    "spider": spider,
    "hybrid-sarah": hybrid_sarah,
}


def minimize_finite_sum(
    problem: FiniteSum,
    x0: Array,
    evaluations: int,
    *,
    method: str,
    step_size: float | None = None,
    rng: int,
    callback: Callable[[OptimizeResult], Any] | None = None,
    **options: Any,
) -> OptimizeResult:
    """Run a method until `evaluations` gradients of single data points are spent.

    Args:
        problem: A finite sum.
        x0: The first iterate.
        evaluations: The budget, anchors and mega-batches included.
        method: A name in `METHODS`.
        step_size: None for the step size of the method's theory.
        rng: A seed.
        callback: `callback(result)` after each move, with `x`, `nit` and `ngev`.
        **options: `batch_size`; for "spider" also `accuracy`.

    Returns:
        `x`, `nit`, `ngev`, and `success`, False if the run diverged.
    """
    f = CountedGradients(problem, evaluations, np.random.default_rng(rng), step_size)
    result = OptimizeResult()
    result.update({"x": x0, "nit": 0, "success": True})
    with suppress(BudgetSpent), np.errstate(over="ignore", invalid="ignore"):
        for nit, x in enumerate(METHODS[method](f, x0, **options), start=1):
            if not np.isfinite(x).all():
                result["success"] = False
                break
            result.update({"x": x, "nit": nit, "ngev": f.spent})
            if callback is not None:
                callback(result)
    result["ngev"] = f.spent  # includes an anchor after the last move
    return result
