"""The scalar rules of the STORM family: the gain `a` and the step size `eta`.

A rule is a pure function `(sums, |g_t|^2, |d_t|^2, t) -> (sums, a_{t+1}, eta_t)`. It uses
arithmetic only, so it runs on floats and on arrays of NumPy, torch and jax, and imports none of
them. Every backend calls these rules; there is no second copy of a formula.

| here                | paper                              |
|---------------------|------------------------------------|
| `g_sq`, `d_sq`      | |g_t|^2, |d_t|^2                   |
| `a`                 | a_{t+1}                            |
| `eta`               | eta_t                              |
| `sum_g_sq`          | sum_{i<=t} |g_i|^2                 |
| `sum_d_sq_over_a`   | sum_{i<=t} |d_i|^2 / a_{i+1}       |

With `unit` g_0, a backend passes |g_t|^2 / g_0^2 and |d_t|^2 / g_0^2 and moves by
lr eta_t d_t / g_0, as if the loss were divided by g_0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

# A float, or an array of any framework.
Scalar: TypeAlias = Any


def check_unit(unit: Any) -> float | str:
    """Return the unit of the gradient: "first", or a positive number with a finite square."""
    if isinstance(unit, str) and unit == "first":
        return unit
    if not isinstance(unit, bool) and isinstance(unit, Real):
        value = float(unit)
        if value > 0 and 0 < value * value < math.inf:  # squared norms are divided by it
            return value
    raise ValueError(f"unit must be a positive finite number or 'first', got {unit!r}")


def _check_positive(rule: Any) -> None:
    """Raise unless every field of a rule is a positive finite number; store it as a float.

    Arrays of JAX, which may be tracers, are neither checked nor converted.
    """
    for field in fields(rule):
        value = getattr(rule, field.name)
        if type(value).__module__.startswith("jax"):
            continue
        if not (isinstance(value, Real) and 0 < float(value) < math.inf):
            raise ValueError(f"{field.name} must be a positive finite number, got {value!r}")
        object.__setattr__(rule, field.name, float(value))  # JSON has no NumPy numbers


def _two_sum(left: Scalar, right: Scalar) -> tuple[Scalar, Scalar]:
    """Return the rounded sum and its rounding error, exactly (Knuth's TwoSum)."""
    value = left + right
    seen = value - left
    return value, (left - (value - seen)) + (right - seen)


class Sum(NamedTuple):
    """A running sum and its rounding error.

    Without the second number a float32 sum would stop growing after some 10^7 equal terms.
    """

    value: Scalar = 0.0
    lost: Scalar = 0.0

    @property
    def total(self) -> Scalar:
        return self.value + self.lost

    def plus(self, term: Scalar) -> Sum:
        # Beyond the paper: compensated. The error is added back before it loses digits itself.
        value, lost = _two_sum(self.value, term)
        return Sum(*_two_sum(value, self.lost + lost))


class Sums(NamedTuple):
    """The state of a rule between steps: two running sums."""

    sum_g_sq: Sum = Sum()
    sum_d_sq_over_a: Sum = Sum()

    def pack(self) -> dict[str, Scalar]:
        """Return the numbers of both sums by name."""
        numbers = {}
        for name, total in self._asdict().items():
            numbers[name], numbers[f"{name}_lost"] = total
        return numbers

    @classmethod
    def unpack(cls, numbers: Mapping[str, Scalar]) -> Sums:
        """Return the sums whose numbers have the names that `pack` uses."""
        return cls(*(Sum(numbers[name], numbers[f"{name}_lost"]) for name in cls._fields))


Outcome: TypeAlias = tuple[Sums, Scalar, Scalar]  # sums, a_{t+1}, eta_t
Rule: TypeAlias = Callable[[Sums, Scalar, Scalar, Scalar], Outcome]


def _inverse_cube_root(total: Scalar) -> Scalar:
    # Beyond the paper: 0^(-1/3) is taken as 1. While every d is zero, so is the step eta d.
    return (total + (total == 0)) ** (-1 / 3)


@dataclass(frozen=True)
class StormPlusRule:
    """STORM+, Algorithm 1."""

    def __call__(self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar) -> Outcome:
        sum_g_sq = sums.sum_g_sq.plus(g_sq)
        a = (1 + sum_g_sq.total) ** (-2 / 3)  # Alg. 1, line 3, left
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)
        eta = _inverse_cube_root(sum_d_sq_over_a.total)  # Alg. 1, line 3, right
        return Sums(sum_g_sq, sum_d_sq_over_a), a, eta


@dataclass(frozen=True)
class SimplifiedStormPlusRule:
    """Simplified STORM+, Sec. 4.2: a_{t+1} = t^(-2/3), the step size of STORM+."""

    def __call__(self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar) -> Outcome:
        sum_g_sq = sums.sum_g_sq.plus(g_sq)  # enters no formula; reported
        a = t ** (-2 / 3)  # Sec. 4.2
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)
        eta = _inverse_cube_root(sum_d_sq_over_a.total)  # Alg. 1, line 3, right
        return Sums(sum_g_sq, sum_d_sq_over_a), a, eta


@dataclass(frozen=True)
class StormRule:
    """STORM (Cutkosky & Orabona 2019), in the form of the paper's section "Method".

    `lr` enters no rule, while theta enters the gain as theta^2. With the default constants the gain
    is (0.1 + sum |g_i|^2)^(-2/3): that of STORM+ with 0.1 in place of 1.

    Args:
        theta: Numerator of the step size (k in Cutkosky & Orabona).
        w: Offset under the cube root; must be positive.
        c: Factor of the gain.
        smoothness: L, the smoothness of the objective.
    """

    theta: float = 0.1
    w: float = 0.1
    c: float = 100.0
    smoothness: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self)
        if any(type(v).__module__.startswith("jax") for v in vars(self).values()):
            return
        eta = self.theta / self.w ** (1 / 3)  # the largest: before the first gradient
        # Products overflow to inf, where `**` would raise OverflowError.
        a = self.smoothness * self.smoothness * self.c * eta * eta
        if not 0 < a < math.inf:
            raise ValueError(f"c L^2 eta^2 must be positive and finite, got {a} from {self}")

    def __call__(self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar) -> Outcome:
        sum_g_sq = sums.sum_g_sq.plus(g_sq)
        eta = self.theta / (self.w + sum_g_sq.total) ** (1 / 3)
        a = self.c * self.smoothness**2 * eta**2
        # Beyond the paper: never above 1, which Theorem 1 of Cutkosky & Orabona ensures by its w.
        a = a * (a <= 1) + (a > 1)  # min(1, a), for numbers and arrays of any framework
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)  # enters no formula; reported
        return Sums(sum_g_sq, sum_d_sq_over_a), a, eta


@dataclass(frozen=True)
class _MetaStorm(ABC):
    """What the META-STORM rules share (Liu et al. 2022, arXiv 2209.14853): eta_t = 1 / b_t.

    b_t = (b_0^(1/p) + sum |d_i|^2)^p / a_{t+1}^q with p + 2q = 1. `sum_d_sq_over_a` holds
    sum |d_i|^2. docs/theory.md says what was compared with an author's code.

    Args:
        a_0: The scale of the gain.
        b_0: Lower bound of b_t.
        p: Power of sum |d_i|^2, in [1/4, 1/2].
    """

    a_0: float = 1.0
    b_0: float = 1.0
    p: float = 0.5

    def __post_init__(self) -> None:
        _check_positive(self)
        if not 0.25 <= self.p <= 0.5:
            raise ValueError(f"p must be between 1/4 and 1/2, got {self.p}")

    @abstractmethod
    def gain(self, sum_g_sq: Scalar, t: Scalar) -> Scalar:
        """Return a_{t+1}."""

    def __call__(self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar) -> Outcome:
        sum_g_sq, sum_d_sq = sums.sum_g_sq.plus(g_sq), sums.sum_d_sq_over_a.plus(d_sq)
        a = self.gain(sum_g_sq.total, t)
        b = (self.b_0 ** (1 / self.p) + sum_d_sq.total) ** self.p
        return Sums(sum_g_sq, sum_d_sq), a, a ** ((1 - self.p) / 2) / b


@dataclass(frozen=True)
class MetaStormSGRule(_MetaStorm):
    """META-STORM-SG: a_0 is the unit of the gradient. Assumes bounded gradients, not values."""

    def gain(self, sum_g_sq: Scalar, t: Scalar) -> Scalar:
        return (1 + sum_g_sq / self.a_0**2) ** (-2 / 3)


@dataclass(frozen=True)
class MetaStormNARule(_MetaStorm):
    """META-STORM-NA: the gain falls after a_0 steps, and does not adapt to the noise.

    Assumes neither bounded gradients nor bounded values.
    """

    def gain(self, sum_g_sq: Scalar, t: Scalar) -> Scalar:
        return (1 + t / self.a_0) ** (-2 / 3)


@dataclass(frozen=True)
class NormalizedStormRule:
    """STORM with normalized moves: a_{t+1} = t^(-2/3), eta_t = t^(-2/3) / |d_t|.

    A move has the length lr t^(-2/3) whatever the gradient is. Assumes bounded variance and smooth
    samples. With T in place of t it is Theorem 4, second case, m = B_1 = 1, of Jiang et al.,
    "Solving Finite-sum Coupled Compositional Optimization via Multi-block-Single-probe Estimator".
    """

    def __call__(self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar) -> Outcome:
        a = t ** (-2 / 3)
        eta = a * (d_sq + (d_sq == 0)) ** (-1 / 2)  # if d = 0 the move is zero for every eta
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)  # enters no formula; reported
        return Sums(sums.sum_g_sq.plus(g_sq), sum_d_sq_over_a), a, eta


@dataclass(frozen=True)
class AdaStormRule:
    """Ada-STORM (Jiang et al. 2024, arXiv 2406.01959), Algorithm 1 with Eq. (3).

    a = T^(-2/3), eta_t = min(T^(-1/3), T^(-(1-alpha)/3) (sum |d_i|^2)^(-alpha)). Needs the
    horizon T; assumes bounded variance and samples that are smooth on average. The first batch of
    the paper has T^(1/3) samples, which is up to the caller. `sum_d_sq_over_a` holds sum |d_i|^2.

    Args:
        horizon: T, the number of samples of the run.
        alpha: In (0, 1/3); the paper recommends 0.3.
    """

    horizon: float
    alpha: float = 0.3

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.alpha >= 1 / 3 or self.horizon < 1:
            raise ValueError(f"alpha must be below 1/3 and horizon at least 1, got {self}")

    def __call__(self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar) -> Outcome:
        sum_d_sq = sums.sum_d_sq_over_a.plus(d_sq)
        # min(1, (s / T^(1/3))^(-alpha)) = max(1, s / T^(1/3))^(-alpha), for any array library
        ratio = sum_d_sq.total / self.horizon ** (1 / 3)
        eta = self.horizon ** (-1 / 3) * (ratio * (ratio > 1) + (ratio <= 1)) ** -self.alpha
        a = self.horizon ** (-2 / 3) + 0 * d_sq  # of the type and shape of d_sq
        return Sums(sums.sum_g_sq.plus(g_sq), sum_d_sq), a, eta


_RULES: dict[str, type] = {
    "storm+": StormPlusRule,
    "simplified-storm+": SimplifiedStormPlusRule,
    "storm": StormRule,
    "meta-storm-sg": MetaStormSGRule,
    "meta-storm-na": MetaStormNARule,
    "normalized-storm": NormalizedStormRule,
    "ada-storm": AdaStormRule,
}


def make_rule(method: str | Rule, **options: float) -> Rule:
    """Return the rule called `method`, or `method` itself if it is a rule.

    The names are "storm+", "simplified-storm+", "storm", "meta-storm-sg", "meta-storm-na",
    "normalized-storm" and "ada-storm"; `options` are the fields of that rule.
    """
    if not isinstance(method, str):
        if not callable(method) or isinstance(method, type):
            raise TypeError(f"method must be a name or a rule object, got {method!r}")
        if options:
            raise TypeError(f"set {', '.join(options)} on the rule object, {method!r}")
        return method
    if method not in _RULES:
        raise ValueError(f"method must be one of {', '.join(_RULES)}, got {method!r}")
    rule: Rule = _RULES[method](**options)
    return rule


def describe(rule: Any) -> dict[str, Any]:
    """Return what a checkpoint stores about a rule: the name of its class, and its fields."""
    if is_dataclass(rule) and not isinstance(rule, type):
        constants = {f"rule.{f.name}": getattr(rule, f.name) for f in fields(rule)}
        # NaN differs from itself, so that no checkpoint would match.
        if all(isinstance(v, (int, float, str)) and v == v for v in constants.values()):  # noqa: PLR0124
            return {"rule": type(rule).__name__} | constants
    raise TypeError(
        "a rule must be an instance of a frozen dataclass, whose fields are numbers or strings, "
        f"got {rule!r}"
    )
