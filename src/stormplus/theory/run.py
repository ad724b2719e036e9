"""A run of `minimize` with all that the proofs speak of."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult

from stormplus.reference import minimize
from stormplus.theory.bounds import Trace
from stormplus.theory.problems.base import Array, Objective


def trace_run(
    problem: Objective,
    steps: int,
    *,
    x0: Array | None = None,
    method: str = "storm+",
    lr: float = 1.0,
    rng: np.random.Generator | int = 0,
    **rule_options: Any,
) -> Trace:
    """Run `minimize` on a problem and keep every vector of every step.

    Args:
        problem: With a full gradient.
        steps: T.
        x0: The first point; by default the problem's own.
        method: As for `minimize`.
        lr: As for `minimize`.
        rng: As for `minimize`.
        **rule_options: As for `minimize`.
    """
    calls: list[Array] = []
    rows: list[tuple[Array, Array]] = []

    def grad(x: Array, xi: Any) -> Array:
        calls.append(problem.grad(x, xi))
        return calls[-1]

    def keep(result: OptimizeResult) -> None:
        rows.append((result.x, result.estimator))

    start = problem.start() if x0 is None else x0
    result = minimize(
        grad,
        start,
        problem.sample,
        steps,
        method=method,
        lr=lr,
        rng=rng,
        callback=keep,
        **rule_options,
    )
    x, d = (np.array(part) for part in zip(*rows))
    # minimize evaluates g_1, and then g_t before g~_{t-1} (Alg. 1, line 5).
    return Trace(
        x=x,
        g=np.array([calls[0], *calls[1::2]]),
        g_tilde=np.array(calls[2::2]).reshape(steps - 1, x.shape[1]),
        g_bar=np.array([problem.full_grad(point) for point in x]),
        d=d,
        gain=np.array([1.0, *result.history["gain"]]),
        step_size=result.history["step_size"],
    )
