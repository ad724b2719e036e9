"""The paper's scalar rules: what the gain `a` and the step size `eta` are.

A rule is a pure function `(sums, |g_t|^2, |d_t|^2, t) -> (sums, a_{t+1}, eta_t)`. It uses
arithmetic only, so it runs on Python floats, NumPy arrays, torch tensors and jax arrays
alike, elementwise, and imports none of them. Every backend of the library calls these
three classes; there is no second copy of a formula.

| here                | paper                              |
|---------------------|------------------------------------|
| `g_sq`, `d_sq`      | |g_t|^2, |d_t|^2                   |
| `a`                 | a_{t+1}                            |
| `eta`               | eta_t                              |
| `sum_g_sq`          | sum_{i<=t} |g_i|^2                 |
| `sum_d_sq_over_a`   | sum_{i<=t} |d_i|^2 / a_{i+1}       |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

# A float, or an array of any framework that has the arithmetic operators.
Scalar: TypeAlias = Any

NORMS = ("raw", "mean")  # what |.|^2 means: the paper's, or divided by the number of elements
SCOPES = ("global", "group", "tensor")  # which parameters make a bucket: they share their sums


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _two_sum(left: Scalar, right: Scalar) -> tuple[Scalar, Scalar]:
    """The rounded sum, and exactly what rounding has kept out of it (Knuth's TwoSum)."""
    value = left + right
    seen = value - left
    return value, (left - (value - seen)) + (right - seen)


class Sum(NamedTuple):
    """A running sum, and what rounding has kept out of it.

    Float64 hardly needs the second number. Float32, on devices that have nothing wider,
    would stop growing after some 10^7 equal terms without it.
    """

    value: Scalar = 0.0
    lost: Scalar = 0.0

    @property
    def total(self) -> Scalar:
        return self.value + self.lost

    def plus(self, term: Scalar) -> Sum:
        # Beyond the paper: compensated. What was lost is folded back at once, or it would grow
        # until it lost digits of its own.
        value, lost = _two_sum(self.value, term)
        return Sum(*_two_sum(value, self.lost + lost))


class Sums(NamedTuple):
    """What a rule remembers between steps."""

    sum_g_sq: Sum = Sum()
    sum_d_sq_over_a: Sum = Sum()


Rule: TypeAlias = Callable[[Sums, Scalar, Scalar, Scalar], tuple[Sums, Scalar, Scalar]]


def _inverse_cube_root(total: Scalar) -> Scalar:
    # Beyond the paper: 0^(-1/3) is taken as 1. The sum is zero only while every d has been
    # zero, and then the step eta d is zero whatever eta is.
    return (total + (total == 0)) ** (-1 / 3)


@dataclass(frozen=True)
class StormPlusRule:
    """STORM+, Algorithm 1."""

    def __call__(
        self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar
    ) -> tuple[Sums, Scalar, Scalar]:
        sum_g_sq = sums.sum_g_sq.plus(g_sq)
        a = (1 + sum_g_sq.total) ** (-2 / 3)  # Alg. 1, line 3, left
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)
        eta = _inverse_cube_root(sum_d_sq_over_a.total)  # Alg. 1, line 3, right
        return Sums(sum_g_sq, sum_d_sq_over_a), a, eta


@dataclass(frozen=True)
class SimplifiedStormPlusRule:
    """Simplified STORM+, Sec. 4.2: a_{t+1} = t^(-2/3), the step size of STORM+."""

    def __call__(
        self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar
    ) -> tuple[Sums, Scalar, Scalar]:
        sum_g_sq = sums.sum_g_sq.plus(g_sq)  # enters no formula; reported
        a = t ** (-2 / 3)  # Sec. 4.2
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)
        eta = _inverse_cube_root(sum_d_sq_over_a.total)  # Alg. 1, line 3, right
        return Sums(sum_g_sq, sum_d_sq_over_a), a, eta


@dataclass(frozen=True)
class StormRule:
    """STORM (Cutkosky & Orabona 2019), in the form of the paper's Eq. (stormChoices).

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
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, Real) and 0 < float(value) < math.inf):
                raise ValueError(
                    f"{field.name} must be a positive finite number, got {value!r}; "
                    f"the default is {field.default}"
                )
            object.__setattr__(self, field.name, float(value))  # NumPy's and others': no JSON
        eta = self.theta / self.w ** (1 / 3)  # the first; a product overflows without an error
        largest = self.smoothness * self.smoothness * self.c * eta * eta
        if not 0 < largest < math.inf:
            raise ValueError(f"c L^2 eta^2 must be positive and finite, got {largest} from {self}")

    def __call__(
        self, sums: Sums, g_sq: Scalar, d_sq: Scalar, t: Scalar
    ) -> tuple[Sums, Scalar, Scalar]:
        sum_g_sq = sums.sum_g_sq.plus(g_sq)
        eta = self.theta / (self.w + sum_g_sq.total) ** (1 / 3)  # Eq. (stormChoices), left
        a = self.c * self.smoothness**2 * eta**2  # Eq. (stormChoices), right
        # Beyond the paper: never above 1, which Theorem 1 of Cutkosky & Orabona has by its w.
        a = a * (a <= 1) + (a > 1)  # min(1, a), for numbers and arrays of any framework
        sum_d_sq_over_a = sums.sum_d_sq_over_a.plus(d_sq / a)  # enters no formula; reported
        return Sums(sum_g_sq, sum_d_sq_over_a), a, eta


_RULES: dict[str, type] = {
    "storm+": StormPlusRule,
    "simplified-storm+": SimplifiedStormPlusRule,
    "storm": StormRule,
}


def make_rule(method: str, **options: float) -> Rule:
    """The rule called `method`, with the constants it has.

    Args:
        method: "storm+", "simplified-storm+" or "storm".
        **options: For "storm": `theta`, `w`, `c`, `smoothness`.
    """
    check_choice("method", method, tuple(_RULES))
    known = {field.name for field in fields(_RULES[method])}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(
            f"method {method!r} has no option {', '.join(unknown)}; "
            f"it takes {', '.join(sorted(known)) or 'none'}"
        )
    rule: Rule = _RULES[method](**options)
    return rule


def describe(rule: Any) -> dict[str, Any]:
    """What a checkpoint says of a rule: the name of its class, and its fields."""
    if not is_dataclass(rule) or isinstance(rule, type):
        raise TypeError(
            "a rule must be an object of a frozen dataclass, so that a checkpoint can tell which "
            f"one it is, got {rule!r}"
        )
    constants = {f.name: getattr(rule, f.name) for f in fields(rule)}
    for name, value in constants.items():
        if not isinstance(value, (int, float, str)) or (value != value):  # noqa: PLR0124 - a nan
            raise TypeError(
                "a rule's fields must be numbers or words, so that a checkpoint can be compared, "
                f"got {name}={value!r}"
            )
    return {"rule": type(rule).__name__} | {f"rule.{k}": v for k, v in constants.items()}


# Beyond the paper: the formulas of `Untuned` (docs/untuned.md). Every tensor has its own: r is the
# distance that its fastest iterate has come from the start, s a coordinate's root mean square
# gradient, g / s the gradient in its own unit.

# How far the parameters stand from the fast iterate towards the average: Schedule-Free's beta.
INTERPOLATION = 0.9


def natural_scale(inputs: int) -> float:
    """The size of a weight whose layer keeps the size of its signals, to a constant.

    Args:
        inputs: The numbers that make up one output; for a vector, its length.
    """
    return 1 / math.sqrt(max(inputs, 1))


def sample_stride(size: int) -> int:
    """Every how many coordinates the distance is measured, in a tensor of this size.

    A few thousand tell a root mean square to a per cent or two, and save a third buffer. The stride
    has no factor in common with the size: one that divides the length of a row would see the
    same columns in every row, perhaps pixels that are always black.
    """
    stride = max(1, size // 4096)
    while math.gcd(stride, size) > 1:
        stride -= 1
    return stride


def distance_ceiling(start: Scalar, natural: Scalar) -> Scalar:
    """The scale of a tensor, its RMS at the start or its natural scale: r is never above it.

    Without a ceiling r can feed itself: the steps are proportional to r, and r is how far they
    have led.
    """
    return _larger(start, natural)


def first_distance(ceiling: Scalar) -> Scalar:
    """Give r before any move: a sixtieth of the tensor's scale; it grows by itself from there."""
    return ceiling / 60


def next_distance(r: Scalar, measured: Scalar, ceiling: Scalar) -> Scalar:
    """The largest distance so far, from DoG (Ivgi, Hinder and Carmon, 2023), below its ceiling."""
    return _smaller(_larger(r, measured), ceiling)


def untuned_step_size(r: Scalar, counted: Scalar, ceiling: Scalar, evidence: Scalar) -> Scalar:
    """The step in units of s: r over the root of the steps so far.

    The exponent is 1/2, not the 1/3 of STORM+: without the correction the variance of the
    gradients does not go down with t. And no step is larger than the first one, until there is
    evidence that the steps agree: however fast r grows, a layer whose coordinates all move in one
    direction must have time to answer.

    Args:
        r: The distance.
        counted: The steps so far.
        ceiling: The tensor's scale.
        evidence: The sum over the counted steps of the square of `least_agreement`.
    """
    return _smaller(r * (1 + counted) ** (-1 / 2), first_distance(ceiling) * (1 + evidence))


# The square of how far a tensor would have come at random before it has moved: it is divided by,
# and so is the square of it where somebody differentiates through a run.
FIRST_WALK = 1e-18


def least_agreement(moved: Any, walk: Any, asked: Any) -> Any:
    """How well the steps so far agree in the tensor where they do so least.

    The square of how far it has come, over that of a random walk with steps of the same sizes,
    less 1: it is 0 if the steps look like noise, and t - 1 if all are equal.

    One number for all tensors: under softmax the last layer drifts along a direction that no loss
    feels, which looks like agreement, while the layers below it see nothing but noise.

    Args:
        moved: How far each tensor has come; all are arrays, of NumPy or jax.
        walk: The square of how far the random walk would have come, from `FIRST_WALK` on. A tensor
            that has not moved is not asked.
        asked: The matrices; or all tensors, if no matrix is among them.
    """
    most = 1e15
    ratio = moved**2 / walk
    told = (walk > FIRST_WALK) & (ratio < most)  # which nan is not
    least = ratio.min(where=asked & told, initial=most)
    return _larger(least - 1, 0.0) * (least < most)


def asked(axes: Sequence[int]) -> list[bool]:
    """Whom `least_agreement` asks, by how many axes each tensor has."""
    matrices = [n > 1 for n in axes]
    return matrices if any(matrices) else [True] * len(matrices)


def counted_step(mean_square: Scalar) -> Scalar:
    """How much a step counts: as the part of the tensor that it has moved, and one at most.

    `mean_square` is the mean of (g / s)^2: 1 for an ordinary step, near 0 if most of the tensor had
    no gradient.
    """
    return _smaller(mean_square, 1.0)


def unit_weight(t: Scalar) -> Scalar:
    """The weight of the t-th squared gradient in s^2: about the last third of the run.

    (g / s)^2 is then at most (t + 2) / 3, so that no coordinate that has a gradient in every
    step moves by more than r in one.
    """
    return 3 / (t + 2)


def average_weight(t: Scalar) -> Scalar:
    """The weight of the t-th iterate in the average: about the last tenth of the run, as t^8.

    Shamir and Zhang (2013), polynomial-decay averaging.
    """
    return 9 / (t + 8)


def decay_factor(weight_decay: Scalar, eta: Scalar, natural: Scalar, ceiling: Scalar) -> Scalar:
    """What a step takes off a tensor under weight decay, as a part of it.

    For a tensor that starts at its natural scale or below, as layers do, that is AdamW's lr
    times weight_decay, with eta for lr. One that starts larger has steps that are larger in
    proportion, and the same decay.
    """
    return _smaller(weight_decay * eta * natural / ceiling, 1.0)


# Of two numbers or arrays of any framework. What is picked is not made of a difference, or the
# smaller of 1e20 and 1 would be 0. And a nan is one: XLA takes nan times False for 0.
def _larger(a: Scalar, b: Scalar) -> Scalar:
    return a * (a >= b) + b * (a < b) + 0 * (a - b)


def _smaller(a: Scalar, b: Scalar) -> Scalar:
    return a * (a <= b) + b * (a > b) + 0 * (a - b)
