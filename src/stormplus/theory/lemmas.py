"""The paper's inequalities on sequences, each as a pair (left side, right side).

They use arithmetic only, so they run on `float` and on `decimal.Decimal`: an inequality that fails
with 80 digits is false, one that fails in floats alone fails by rounding. `docs/theory.md` lists
the findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

# A float or a decimal.Decimal; one kind per call.
Number: TypeAlias = Any


class Inequality(NamedTuple):
    """`left <= right`, as the paper claims."""

    left: Number
    right: Number

    def holds(self, tolerance: float = 0.0) -> bool:
        """Return whether it holds, up to a fraction `tolerance` of the right side."""
        return bool(self.left <= self.right + type(self.right)(tolerance) * abs(self.right))


def technical_1(b: Sequence[Number], p: Number) -> Inequality:
    """Lemma technical-1: sum_i b_i / (sum_{j<=i} b_j)^p <= (sum_i b_i)^(1-p) / (1-p).

    The paper asks for b_1 > 0. With leading zeros the terms are 0/0; read as 0 (which is
    how d_0 and eta_0 enter the proofs) the statement holds for them too.
    """
    total = list(accumulate(b))
    left = sum(b_i / s_i**p for b_i, s_i in zip(b, total) if s_i > 0)
    return Inequality(left, total[-1] ** (1 - p) / (1 - p))


def shifted_technical_1(
    b: Sequence[Number], first: Number, p: Number, factor: int = 2
) -> Inequality:
    """Lemma shifted-technical-1; `first` is b_0.

    sum_i b_i / (b_0 + sum_{j<i} b_j)^p <= b / b_0^p + 2/(1-p) (b_0 + sum_i b_i)^(1-p).

    It holds with `factor=1` in place of 2: for a decreasing function h and S_i = b_1 + ... + b_i,
    sum_i b_i h(S_{i-1}) - int_0^S h <= sum_i b_i (h(S_{i-1}) - h(S_i)) <= b h(0).
    """
    left = sum(b_i / s_i**p for b_i, s_i in zip(b, accumulate(b, initial=first)))
    return Inequality(left, max(b) / first**p + factor / (1 - p) * (first + sum(b)) ** (1 - p))


def const_sum(a: Sequence[Number], constant: int = 12) -> Inequality:
    """Lemma ConstSum: sum_i a_i / (1 + sum_{j<=i} a_j)^(4/3) <= 12.

    It is a right sum of the integral of (1 + s)^(-4/3) over [0, inf), which is 3: the
    statement holds with `constant=3`, and with no smaller one.
    """
    one = type(a[0])(1)
    left = sum(a_i / (1 + s_i) ** (4 * one / 3) for a_i, s_i in zip(a, accumulate(a)))
    return Inequality(left, constant * one)


def const_sum_delayed(a: Sequence[Number], constant: int = 12, multiple: int = 2) -> Inequality:
    """Lemma ConstSum_Delayed: sum_i a_i / (1 + sum_{j<i} a_j)^(4/3) <= 12 + 2 a_max.

    By the argument of `shifted_technical_1` it holds with 3 + a_max (`constant=3, multiple=1`).
    """
    one = type(a[0])(1)
    left = sum(a_i / s_i ** (4 * one / 3) for a_i, s_i in zip(a, accumulate(a, initial=one)))
    return Inequality(left, constant + multiple * max(a))


def young(a: Number, b: Number, rho: Number) -> Inequality:
    """Eq. (YoungsIneqVersion): a^(2/9) b^(1/3) <= (2/3) a^(1/3) rho^(3/2) + b / (3 rho^3)."""
    one = type(a)(1)
    left = a ** (2 * one / 9) * b ** (one / 3)
    return Inequality(left, 2 * a ** (one / 3) * rho ** (3 * one / 2) / 3 + b / (3 * rho**3))


def gains(g_sq: Sequence[Number]) -> list[Number]:
    """Return a_1, ..., a_{T+1} of STORM+ for squared gradient norms |g_1|^2, ..., |g_T|^2."""
    one = type(g_sq[0])(1)
    return [total ** (-2 * one / 3) for total in accumulate(g_sq, initial=one)]


def beta(grad_bound: Number) -> Number:
    """Return the threshold beta = min(1, 1/G^4)."""
    return 1 / max(type(grad_bound)(1), grad_bound**4)


def inverse_beta_tilde(grad_bound: Number) -> Number:
    """Return 1/beta~ = (1/beta^(3/2) + G^2)^(2/3)."""
    one = type(grad_bound)(1)
    return (beta(grad_bound) ** (-3 * one / 2) + grad_bound**2) ** (2 * one / 3)


def tau_star(a: Sequence[Number], grad_bound: Number) -> int:
    """Return tau* = max{t in [T]: a_t >= beta}, for a_1, ..., a_{T+1}.

    It is a stopping time because a_t never grows: {tau* <= t} = {a_{t+1} < beta} for
    t < T, and a_{t+1} is known at time t.
    """
    return max(t for t, a_t in enumerate(a[:-1], start=1) if a_t >= beta(grad_bound))


def ats_tau_star(
    g_sq: Sequence[Number], grad_bound: Number
) -> tuple[list[Inequality], list[Inequality]]:
    """Lemma AtsTauStar, both parts, one inequality per step.

    1/a_{t+1} <= 1/beta~ for t <= tau*, and 1/a_{t+1} - 1/a_t <= 2/3 for t >= tau* + 1.
    """
    a = gains(g_sq)  # a_{t+1} is a[t]
    last, inverse = tau_star(a, grad_bound), inverse_beta_tilde(grad_bound)
    first_part = [Inequality(1 / a[t], inverse) for t in range(1, last + 1)]
    bound = 2 * type(grad_bound)(1) / 3
    after = range(last + 1, len(a))
    return first_part, [Inequality(1 / a[t] - 1 / a[t - 1], bound) for t in after]
