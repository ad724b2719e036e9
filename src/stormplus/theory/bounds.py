"""Whole runs with every vector of the proofs, and the paper's bounds on them with constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stormplus.reference import minimize
from stormplus.theory.lemmas import Inequality, beta, inverse_beta_tilde, tau_star
from stormplus.theory.problems.base import Array, Objective


class Trace(NamedTuple):
    """Every vector of a run; row t - 1 is time t."""

    x: Array  # x_1, ..., x_T
    g: Array  # g_t = grad f(x_t; xi_t)
    g_tilde: Array  # g~_t = grad f(x_t; xi_{t+1}); T - 1 rows
    g_bar: Array  # grad f(x_t)
    d: Array  # d_t
    gain: Array  # a_1, ..., a_{T+1}
    step_size: Array  # eta_t

    @property
    def error(self) -> Array:
        """eps_t = d_t - grad f(x_t)."""
        return self.d - self.g_bar

    @property
    def z(self) -> Array:
        """Z_t = (g_t - g~_{t-1}) - (g_bar_t - g_bar_{t-1}), for t = 2, ..., T."""
        return (self.g[1:] - self.g_tilde) - (self.g_bar[1:] - self.g_bar[:-1])


def trace_run(problem: Objective, steps: int, *, x0: Array | None = None, **options: Any) -> Trace:
    """Run `minimize` with its `options`, and return every vector of every step.

    Defaults: `x0` is `problem.start()`, and `rng` is 0.
    """
    calls: list[Array] = []
    rows: list[tuple[Array, Array]] = []

    def grad(x: Array, xi: Any) -> Array:
        calls.append(problem.grad(x, xi))
        return calls[-1]

    def record(result: Any) -> None:
        rows.append((result.x, result.estimator))

    start = problem.start() if x0 is None else x0
    result = minimize(grad, start, problem.sample, steps, callback=record, **{"rng": 0} | options)
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


def square_sums(rows: Array) -> float:
    """Return sum_t |row_t|^2."""
    return float((rows * rows).sum())


def error_dynamics(trace: Trace) -> Array:
    """Return the residual of Eq. (ErrorDynamics) for t = 2, ..., T: zero up to rounding.

    eps_t - [(1 - a_t) eps_{t-1} + a_t (g_t - g_bar_t) + (1 - a_t) Z_t].
    """
    a = trace.gain[1:-1, None]  # a_2, ..., a_T
    error = trace.error
    noise = trace.g[1:] - trace.g_bar[1:]
    return error[1:] - ((1 - a) * error[:-1] + a * noise + (1 - a) * trace.z)


def sum_of_gradients(
    trace: Trace, smoothness: float, value_range: float, lr: float = 1.0
) -> Inequality:
    """Lemma SunGradSTORMP, on one run of STORM+ or simplified STORM+.

    sum |g_bar_t|^2 <= sum |eps_t|^2 + 2 B a_{T+1}^(-1/3) D^(1/3) + (3/2) L D^(2/3), with
    D = sum |d_t|^2. Beyond the paper: a learning rate divides the second term and
    multiplies the third.
    """
    total = square_sums(trace.d)
    descent = 2 * value_range / lr * trace.gain[-1] ** (-1 / 3) * total ** (1 / 3)
    curvature = 1.5 * lr * smoothness * total ** (2 / 3)
    right = square_sums(trace.error) + descent + curvature
    return Inequality(square_sums(trace.g_bar), float(right))


def offline_sum(trace: Trace, smoothness: float, value_range: float) -> Inequality:
    """The last line of Eq. (OfflineCase), on one run without noise.

    S <= B (1 + S)^(2/9) S^(1/3) + L S^(2/3) with S = sum |g_bar_t|^2.
    """
    s = square_sums(trace.g_bar)
    descent = value_range * (1 + s) ** (2 / 9) * s ** (1 / 3)
    return Inequality(s, descent + smoothness * s ** (2 / 3))


def offline_sum_bound(smoothness: float, value_range: float) -> float:
    """Return the bound on sum |g_bar_t|^2 of the offline theorem, valid for every T.

    max(1, 8 L^3, 2^(11/4) B^(9/4)), by `offline_sum`: one of its two terms is at least S/2, and
    1 + S <= 2S beyond S = 1.
    """
    return float(max(1.0, 8 * smoothness**3, 2 ** (11 / 4) * value_range ** (9 / 4)))


class MainConstants(NamedTuple):
    """kappa and M of Theorem StormpMain, up to absolute factors."""

    kappa: float
    offset: float


def main_theorem_constants(
    smoothness: float, grad_bound: float, value_range: float, *, as_printed: bool = False
) -> MainConstants:
    """Return the constants of E|grad f(x_bar)| <= O(M / sqrt(T) + kappa sigma^(1/3) / T^(1/3)).

    The paper prints kappa = B^(3/4) + L^(3/2). The proof has (1024 L^3 + 12)(sigma^2 T)^(1/3)
    in case 1, so an absolute constant belongs to kappa: 1 + B^(3/4) + L^(3/2). Without it
    the theorem is false (`docs/theory.md`).
    """
    kappa = value_range**0.75 + smoothness**1.5 + (0.0 if as_printed else 1.0)
    offset = 1 + smoothness**2.25 + value_range**1.125 + grad_bound**5
    return MainConstants(kappa, offset + (smoothness * grad_bound**4) ** 1.5)


def expected_error_simplified(
    traces: Sequence[Trace], smoothness: float, noise: float
) -> Inequality:
    """Eq. (EpsFinalPartA), with the mean over runs of simplified STORM+ for E.

    E sum |eps_t|^2 <= 72 L^2 T^(2/9) (E sum |d_t|^2)^(1/3) + 24 sigma^2 T^(1/3).
    """
    T = len(traces[0].d)
    drift = 72 * smoothness**2 * T ** (2 / 9) * _mean(trace.d for trace in traces) ** (1 / 3)
    error = _mean(trace.error for trace in traces)
    return Inequality(error, drift + 24 * noise**2 * T ** (1 / 3))


def expected_error(
    traces: Sequence[Trace], smoothness: float, grad_bound: float
) -> tuple[Inequality, Inequality]:
    """Eqs. (EpsBoundFirstPart) and (FinalFormSplitCases), the mean over runs of STORM+ for E.

    E sum_{t<=tau*} |eps_t|^2 <= 2 C_1 / beta + 24 (L^2 / beta) D^(1/3), with C_1 = 12 + 2 G^2 and
    D = E sum |d_t|^2; and (1/3) E sum |eps_t|^2 <= 24 L^2 / (beta beta~) D^(1/3)
    + 2 C_1 / (beta beta~) + 2 G^2 + (1024 L^3 + 12) (1 + E sum |g_t|^2)^(1/3) + D / 64.
    """
    d_sum, g_sum = _mean(trace.d for trace in traces), _mean(trace.g for trace in traces)
    first = 24 * smoothness**2 * d_sum ** (1 / 3) + 2 * (12 + 2 * grad_bound**2)
    first /= beta(grad_bound)
    whole = first * inverse_beta_tilde(grad_bound) + 2 * grad_bound**2 + d_sum / 64
    whole += (1024 * smoothness**3 + 12) * (1 + g_sum) ** (1 / 3)
    early = _mean(t.error[: tau_star(t.gain.tolist(), grad_bound)] for t in traces)
    error = _mean(trace.error for trace in traces)
    return Inequality(early, first), Inequality(error / 3, whole)


def _mean(parts: Iterable[Array]) -> float:
    """Return the mean over runs of sum_t |row_t|^2."""
    return float(np.mean([square_sums(rows) for rows in parts]))
