"""Variance-reduction methods for finite sums, to be read beside their papers.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult

from stormplus.theory.problems.base import Array, FiniteSum

Indices = NDArray[np.int64]


class BudgetSpent(Exception):
    """The next gradient would exceed the budget."""


class CountedGradients:
    """Gradients of a finite sum; counts one per data point and raises `BudgetSpent`."""

    def __init__(self, problem: FiniteSum, budget: int, rng: np.random.Generator) -> None:
        self.problem, self.budget, self.rng, self.spent = problem, budget, rng, 0
        self.n = problem.n_samples
        self.everything = np.arange(self.n)

    def draw(self, size: int) -> Indices:
        return self.problem.sample_batch(self.rng, size)

    def grad(self, x: Array, xi: Indices) -> Array:
        if self.spent + len(xi) > self.budget:
            raise BudgetSpent
        self.spent += len(xi)
        return self.problem.grad(x, xi)

    def difference(self, x: Array, other: Array, xi: Indices) -> Array:
        """Return g_S(x) - g_S(other): two gradients per data point."""
        if self.spent + 2 * len(xi) > self.budget:
            raise BudgetSpent
        return self.grad(x, xi) - self.grad(other, xi)


def svrg(
    gradients: CountedGradients,
    x: Array,
    *,
    smoothness: float,
    step_size: float | None,
    batch_size: int = 1,
) -> Iterator[Array]:
    """SVRG for non-convex sums (Reddi et al. 2016; Allen-Zhu & Hazan 2016).

    Theory: step size mu / (L n^(2/3)) and n / (3 mu) inner steps, batches of 1. Theorem 2 of Reddi
    et al. needs Gamma > 0; with mu = 1/4 and n = 569, Gamma L n^(2/3) is at least 0.224.
    """
    mu = 0.25
    eta = mu / (smoothness * gradients.n ** (2 / 3)) if step_size is None else step_size
    inner = max(1, int(gradients.n / (3 * mu) / batch_size))
    while True:
        anchor, full = x, gradients.grad(x, gradients.everything)
        for _ in range(inner):
            v = gradients.difference(x, anchor, gradients.draw(batch_size)) + full
            x = x - eta * v
            yield x


def scsg(
    gradients: CountedGradients,
    x: Array,
    *,
    smoothness: float,
    step_size: float | None,
    batch_size: int = 1,
) -> Iterator[Array]:
    """SCSG (Lei et al. 2017): mega-batches of B_j points, a geometric number of steps.

    Theory: B_j = min(j^(3/2), n), at least 8 batches; step size gamma (b / B_j)^(2/3) / L with
    gamma = 1/3, as in the paper. A tuned `step_size` replaces gamma / L.
    """
    scale = 1 / (3 * smoothness) if step_size is None else step_size
    j = 0
    while True:
        j += 1
        size = min(max(math.ceil(j**1.5), 8 * batch_size), gradients.n)
        mega = gradients.rng.choice(gradients.n, size, replace=False)
        anchor, mean = x, gradients.grad(x, mega)
        eta = scale * (batch_size / size) ** (2 / 3)
        # The number of failures before a success of probability b / (B + b): mean B / b.
        for _ in range(gradients.rng.geometric(batch_size / (size + batch_size)) - 1):
            v = gradients.difference(x, anchor, gradients.draw(batch_size)) + mean
            x = x - eta * v
            yield x


def spider(
    gradients: CountedGradients,
    x: Array,
    *,
    smoothness: float,
    step_size: float | None,
    batch_size: int | None = None,
    accuracy: float = 1e-2,
) -> Iterator[Array]:
    """SPIDER-SFO (Fang et al. 2018), finite-sum case with the paper's n_0 = 1.

    Theory: batches of sqrt(n), a full pass every sqrt(n) steps, a move of length at most
    accuracy / L: step size min(accuracy / (L |v|), 1 / (2 L)). A tuned `step_size` is constant.
    """
    root = max(1, round(math.sqrt(gradients.n)))
    size = root if batch_size is None else batch_size
    previous = x
    while True:
        v = gradients.grad(x, gradients.everything)
        for k in range(root):
            if k > 0:
                v = v + gradients.difference(x, previous, gradients.draw(size))
            length = float(np.linalg.norm(v))
            eta = 1 / (2 * smoothness) if step_size is None else step_size
            if step_size is None and length > 0:
                eta = min(eta, accuracy / (smoothness * length))
            previous, x = x, x - eta * v
            yield x


def hybrid_sarah(
    gradients: CountedGradients,
    x: Array,
    *,
    smoothness: float,
    step_size: float | None,
    batch_size: int = 1,
) -> Iterator[Array]:
    """The hybrid SARAH-SGD estimator with one loop (Tran-Dinh et al. 2019).

    v <- beta (v + g_i(x) - g_i(x_previous)) + (1 - beta) g_j(x), i and j independent:
    three gradients per step. Theory, for a horizon of m steps: a first mega-batch of
    (m + 1)^(1/3) points, beta = 1 - 1 / sqrt(mega (m + 1)), and the largest step size with
    1 - L eta - (L eta alpha)^2 >= 0, alpha^2 = beta^2 (1 - beta^(2m)) / (1 - beta^2).
    """
    horizon = max(1, gradients.budget // (3 * batch_size))
    mega = min(math.ceil((horizon + 1) ** (1 / 3)), gradients.n)
    beta = 1 - 1 / math.sqrt(mega * (horizon + 1))
    alpha_sq = beta**2 * (1 - beta ** (2 * horizon)) / (1 - beta**2)
    eta = 2 / (smoothness * (1 + math.sqrt(1 + 4 * alpha_sq))) if step_size is None else step_size
    v = gradients.grad(x, gradients.draw(mega))
    while True:
        previous, x = x, x - eta * v
        yield x
        drift = gradients.difference(x, previous, gradients.draw(batch_size))
        v = beta * (v + drift) + (1 - beta) * gradients.grad(x, gradients.draw(batch_size))


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
    smoothness: float | None = None,
    rng: np.random.Generator | int | None = None,
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
        smoothness: L; by default that of the problem.
        rng: A generator or a seed.
        callback: `callback(result)` after each move, with `x`, `nit` and `ngev`.
        **options: `batch_size`; for "spider" also `accuracy`.

    Returns:
        `x`, `x_uniform` (uniform over the iterates after each move), `nit`, `ngev`; and
        `success`, False if the run diverged.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if smoothness is None:
        smoothness = problem.constants.smoothness
    if smoothness is None:
        raise ValueError("the problem has no L: pass smoothness=...")
    rng = np.random.default_rng(rng)
    (reservoir,) = rng.spawn(1)
    gradients = CountedGradients(problem, evaluations, rng)
    result = OptimizeResult()
    result.update({"x": x0, "x_uniform": x0, "nit": 0, "ngev": 0, "success": True})
    result["message"] = "the budget is spent"
    moves = METHODS[method](gradients, x0, smoothness=smoothness, step_size=step_size, **options)
    while True:
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # divergence is reported below
                x = next(moves)
        except BudgetSpent:
            result["ngev"] = gradients.spent  # includes an anchor after the last move
            return result
        if not np.isfinite(x).all():
            result.update({"ngev": gradients.spent, "success": False, "message": "diverged"})
            return result
        nit = result["nit"] + 1
        result.update({"x": x, "nit": nit, "ngev": gradients.spent})
        if reservoir.integers(nit) == 0:
            result["x_uniform"] = x
        if callback is not None:
            callback(result)
