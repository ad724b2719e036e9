"""The variance-reduction methods the paper compares itself with, in reference form.

SVRG, SCSG, SPIDER and the hybrid SARAH estimator, on finite sums, in NumPy, to be read
beside their papers. Every gradient of every sample is counted, those of anchor points and
mega-batches too: STORM+ with batches of b pays 2b a step and nothing else.

| method         | estimator, with the step before's x' and v'   | what it needs besides           |
|----------------|-----------------------------------------------|---------------------------------|
| `svrg`         | g_i(x) - g_i(anchor) + full(anchor)           | L, n; a full pass an anchor     |
| `scsg`         | the same, the anchor's mean over B_j samples  | L; mega-batches that grow       |
| `spider`       | v' + g_S(x) - g_S(x')                         | L, n, the accuracy; full passes |
| `hybrid-sarah` | b (v' + g_i(x) - g_i(x')) + (1 - b) g_j(x)    | L, the horizon; one mega-batch  |
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


class _Spent(Exception):
    """The next gradient would exceed the budget."""


class _Oracle:
    """Gradients of one finite sum, counted by the sample."""

    def __init__(self, problem: FiniteSum, budget: int, rng: np.random.Generator) -> None:
        self.problem, self.budget, self.rng, self.spent = problem, budget, rng, 0
        self.n = problem.n_samples
        self.everything = np.arange(self.n)

    def grad(self, x: Array, indices: Indices) -> Array:
        if self.spent + len(indices) > self.budget:
            raise _Spent
        self.spent += len(indices)
        return self.problem.grad(x, indices)

    def pair(self, x: Array, other: Array, indices: Indices) -> Array:
        """g_S(x) - g_S(other): two gradients a sample."""
        if self.spent + 2 * len(indices) > self.budget:
            raise _Spent
        return self.grad(x, indices) - self.grad(other, indices)

    def draw(self, size: int) -> Indices:
        return self.problem.sample_batch(self.rng, size)


def svrg(
    oracle: _Oracle, x: Array, *, smoothness: float, step: float | None, batch_size: int
) -> Iterator[Array]:
    """SVRG for non-convex sums (Reddi et al. 2016; Allen-Zhu & Hazan 2016).

    Theory: step mu / (L n^(2/3)) and n / (3 mu) inner steps, mu = 1/4, batches of 1.
    """
    mu = 0.25
    eta = mu / (smoothness * oracle.n ** (2 / 3)) if step is None else step
    inner = max(1, int(oracle.n / (3 * mu) / batch_size))
    while True:
        anchor, full = x, oracle.grad(x, oracle.everything)
        for _ in range(inner):
            v = oracle.pair(x, anchor, oracle.draw(batch_size)) + full
            x = x - eta * v
            yield x


def scsg(
    oracle: _Oracle, x: Array, *, smoothness: float, step: float | None, batch_size: int
) -> Iterator[Array]:
    """SCSG (Lei et al. 2017): mega-batches of B_j samples, a geometric number of steps.

    Theory: B_j = min(j^(3/2), n), at least 8 batches; step (b / B_j)^(2/3) / (3 L).
    A tuned `step` replaces 1 / (3 L).
    """
    scale = 1 / (3 * smoothness) if step is None else step
    j = 0
    while True:
        j += 1
        size = min(max(math.ceil(j**1.5), 8 * batch_size), oracle.n)
        mega = oracle.rng.choice(oracle.n, size, replace=False)
        anchor, mean = x, oracle.grad(x, mega)
        eta = scale * (batch_size / size) ** (2 / 3)
        # The number of failures before a success of probability b / (B + b): mean B / b.
        for _ in range(oracle.rng.geometric(batch_size / (size + batch_size)) - 1):
            v = oracle.pair(x, anchor, oracle.draw(batch_size)) + mean
            x = x - eta * v
            yield x


def spider(
    oracle: _Oracle,
    x: Array,
    *,
    smoothness: float,
    step: float | None,
    batch_size: int | None = None,
    accuracy: float = 1e-2,
) -> Iterator[Array]:
    """SPIDER-SFO (Fang et al. 2018), finite-sum case with n_0 = 1.

    Theory: batches of sqrt(n), a full pass every sqrt(n) steps, a move of length at most
    accuracy / L: step min(accuracy / (L |v|), 1 / (2 L)). A tuned `step` is constant.
    """
    root = max(1, round(math.sqrt(oracle.n)))
    size = root if batch_size is None else batch_size
    previous = x
    while True:
        v = oracle.grad(x, oracle.everything)
        for k in range(root):
            if k > 0:
                v = v + oracle.pair(x, previous, oracle.draw(size))
            length = float(np.linalg.norm(v))
            eta = 1 / (2 * smoothness) if step is None else step
            if step is None and length > 0:
                eta = min(eta, accuracy / (smoothness * length))
            previous, x = x, x - eta * v
            yield x


def hybrid_sarah(
    oracle: _Oracle, x: Array, *, smoothness: float, step: float | None, batch_size: int
) -> Iterator[Array]:
    """The hybrid SARAH-SGD estimator with one loop (Tran-Dinh et al. 2019).

    v <- beta (v + g_i(x) - g_i(x_previous)) + (1 - beta) g_j(x), i and j independent:
    three gradients a step. Theory, for a horizon of m steps: a first mega-batch of
    (m + 1)^(1/3) samples, beta = 1 - 1 / sqrt(mega (m + 1)), and the largest step with
    1 - L eta - (L eta alpha)^2 >= 0, alpha^2 = beta^2 (1 - beta^(2m)) / (1 - beta^2).
    """
    horizon = max(1, oracle.budget // (3 * batch_size))
    mega = min(math.ceil((horizon + 1) ** (1 / 3)), oracle.n)
    beta = 1 - 1 / math.sqrt(mega * (horizon + 1))
    alpha_sq = beta**2 * (1 - beta ** (2 * horizon)) / (1 - beta**2)
    eta = 2 / (smoothness * (1 + math.sqrt(1 + 4 * alpha_sq))) if step is None else step
    v = oracle.grad(x, oracle.draw(mega))
    while True:
        previous, x = x, x - eta * v
        yield x
        drift = oracle.pair(x, previous, oracle.draw(batch_size))
        v = beta * (v + drift) + (1 - beta) * oracle.grad(x, oracle.draw(batch_size))


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
    step: float | None = None,
    smoothness: float | None = None,
    rng: np.random.Generator | int | None = None,
    callback: Callable[[OptimizeResult], Any] | None = None,
    **options: Any,
) -> OptimizeResult:
    """Run a rival until `evaluations` gradients of single samples are spent.

    Args:
        problem: A finite sum.
        x0: The first point.
        evaluations: The budget, anchors and mega-batches included.
        method: "svrg", "scsg", "spider" or "hybrid-sarah".
        step: None for the step its own theory prescribes; else the tuned one.
        smoothness: L; by default the problem's own.
        rng: A generator or a seed.
        callback: `callback(result)` after each move, with `x`, `nit` and `ngev`.
        **options: `batch_size`; for "spider" also `accuracy`.

    Returns:
        `x`, `x_uniform` (uniform over the points after each move), `nit`, `ngev`; and
        `success`, False if the run diverged.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if smoothness is None:
        smoothness = problem.constants.smoothness
    if smoothness is None:
        raise ValueError("this problem's L is not known: pass smoothness=...")
    if method != "spider":
        options.setdefault("batch_size", 1)
    rng = np.random.default_rng(rng)
    (reservoir,) = rng.spawn(1)
    oracle = _Oracle(problem, evaluations, rng)
    result = OptimizeResult()
    result.update({"x": x0, "x_uniform": x0, "nit": 0, "ngev": 0, "success": True})
    result["message"] = "the budget is spent"
    moves = METHODS[method](oracle, x0, smoothness=smoothness, step=step, **options)
    while True:
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # divergence is told below
                x = next(moves)
        except _Spent:
            result["ngev"] = oracle.spent  # a last anchor counts, though it moved nothing
            return result
        if not np.isfinite(x).all():
            result.update({"ngev": oracle.spent, "success": False, "message": "diverged"})
            return result
        nit = result["nit"] + 1
        result.update({"x": x, "nit": nit, "ngev": oracle.spent})
        if reservoir.integers(nit) == 0:
            result["x_uniform"] = x
        if callback is not None:
            callback(result)
