"""The scalar formulas of `Untuned`, for all tensors at once (docs/untuned-rule.md).

Beyond the paper. Every function works elementwise on arrays with one entry per tensor, of NumPy,
torch or JAX; `xp` is that library (`numpy`, `torch`, `jax.numpy`). In the formulas, r is the
distance that sets the step size, s a coordinate's root mean square gradient, and u = g / s.

NumPy takes half a microsecond per operation on arrays of a few numbers, and a tenth more if a
constant is an integer: the formulas have few operations, and constants are floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from stormplus.rules import Sum

Array: TypeAlias = Any  # of NumPy, torch or JAX
Library: TypeAlias = Any  # numpy, torch or jax.numpy

# The parameters are y = (1 - b) z + b x, between the fast iterate z and its average x:
# Schedule-Free's beta.
INTERPOLATION = 0.9

# Initial value of `walk`; positive, so that `displacement_ratio` and its derivative are finite.
INITIAL_WALK = 1e-18

# Stands for "no tensor has moved"; finite, so that derivatives are, and exact in float32.
_MAX_RATIO = 2.0**50


class UntunedScalars(NamedTuple):
    """The scalars of each tensor between two steps.

    Attributes:
        step: How many gradients the tensor has had.
        step_size: eta of the last step; how far z moves where |g| = s, but for the group's lr.
        distance: r of the next step.
        ceiling: R, the tensor's scale. r exceeds it only while the steps agree.
        effective_steps: The steps so far, each counted as the part of the tensor that it moved.
        walk: The squared distance, in units of R^2, of a random walk with the same step sizes.
        evidence: The sum of A squared over the effective steps; see `least_ratio`.
    """

    step: Array
    step_size: Array
    distance: Array
    ceiling: Array
    effective_steps: Sum
    walk: Array
    evidence: Array

    @classmethod
    def from_rows(cls, rows: Mapping[str, Array]) -> UntunedScalars:
        """Take the fields from arrays by name; `effective_steps` is two of them."""
        steps = Sum(rows["effective_steps"], rows["effective_steps_lost"])
        return cls(**{name: rows[name] for name in cls._fields} | {"effective_steps": steps})

    def to_rows(self) -> dict[str, Array]:
        """Return what `from_rows` takes."""
        steps = self.effective_steps
        return self._asdict() | {"effective_steps": steps.value, "effective_steps_lost": steps.lost}


def natural_scale(inputs: int) -> float:
    """Return the scale of weights at which a layer preserves that of its signals, up to a constant.

    Args:
        inputs: How many numbers make up one output; for a vector, its length.
    """
    return 1 / math.sqrt(max(inputs, 1))


def sample_stride(size: int) -> int:
    """Return k: the distance of a tensor of this size is measured on every k-th coordinate.

    A few thousand coordinates give a root mean square to within one or two per cent and save a
    third buffer. k is coprime to the size: a divisor of the row length would select the same
    columns in every row, perhaps pixels that are always black.
    """
    stride = max(1, size // 4096)
    while math.gcd(stride, size) > 1:
        stride -= 1
    return stride


def distance_ceiling(start: Array, natural: Array, xp: Library) -> Array:
    """Return R: the tensor's RMS at the start or its natural scale, whichever is larger.

    Without a ceiling r could feed itself: steps are proportional to r, and r is how far they have
    led. While the steps agree the ceiling is higher, see `after_step`.
    """
    return xp.maximum(start, natural)


def initial_distance(ceiling: Array) -> Array:
    """Return r before the first move, small enough for a pretrained tensor."""
    return ceiling / 200.0


def max_step_size(ceiling: Array, evidence: Array) -> Array:
    """Return the bound on eta: a layer whose coordinates move together needs time to respond."""
    return ceiling / 60.0 * (1.0 + evidence)


def eligible_tensors(axes: Sequence[int]) -> list[bool]:
    """Return which tensors `least_ratio` is taken over: matrices, or all if there is none.

    Args:
        axes: How many axes each tensor has; 0 for an empty one.
    """
    matrices = [n > 1 for n in axes]
    return matrices if any(matrices) else [True] * len(matrices)


def next_step_size(scalars: UntunedScalars, xp: Library) -> Array:
    """Return eta: r over the root of the steps so far, within a bound that evidence raises.

    The exponent is 1/2, not the 1/3 of STORM+: without the correction the variance of the gradients
    does not decrease with t.
    """
    eta = scalars.distance / (1.0 + scalars.effective_steps.value) ** 0.5
    return xp.minimum(eta, max_step_size(scalars.ceiling, scalars.evidence))


def grad_weight(t: Array) -> Array:
    """Return the weight of the t-th squared gradient in s^2: about the last third of the run.

    (g / s)^2 is then at most (t + 2) / 3, so that a step of r / sqrt(t) moves no coordinate by more
    than r.
    """
    return 3.0 / (t + 2.0)


def average_weight(t: Array) -> Array:
    """Return the weight of the t-th iterate in the average: about the last tenth of the run.

    The iterates have weights proportional to t^8: polynomial-decay averaging, Shamir and Zhang
    (2013).
    """
    return 9.0 / (t + 8.0)


def decay_fraction(
    weight_decay: Array, alpha: Array, natural: Array, ceiling: Array, xp: Library
) -> Array:
    """Return the fraction that weight decay removes from a tensor in a step of size alpha.

    For a tensor that starts at its natural scale or below, as layers do, this is AdamW's
    lr * weight_decay with alpha as lr. A tensor that starts larger takes proportionally larger
    steps, and decays at the same rate.
    """
    factor = weight_decay * alpha * natural / ceiling
    return xp.where(factor > 1, 1.0, factor)


def displacement_ratio(displacement: Array, walk: Array) -> Array:
    """Return the squared displacement over that of a random walk with the same step sizes.

    It is about 1 if the steps look like noise, below 1 if they turn around, t if all are equal.

    Args:
        displacement: The RMS of z - z_1 in units of R.
        walk: See `UntunedScalars`.
    """
    return displacement**2 / walk


def grown_distance(displacement: Array, ratio: Array) -> Array:
    """Return the r that a step suggests: DoG's distance, up to four times that if the steps agree.

    DoG's alone (Ivgi, Hinder and Carmon, 2023) grows with the root of t while gradients are mostly
    noise, so that a small start would be costly. Where steps turn around at once, as they can in a
    pretrained network, they stay small.
    """
    return displacement * ratio.clip(1.0, 2.0) ** 2


def least_ratio(ratio: Array, walk: Array, eligible: Array, xp: Library) -> Array:
    """Return 1 + A: the smallest `displacement_ratio`, at least 1.

    A says how well the steps so far agree, in the tensor where they agree least.

    One number for all tensors: under softmax the last layer drifts along a direction that no loss
    depends on, which looks like agreement, while the layers below it see nothing but noise.

    Args:
        ratio: See `displacement_ratio`.
        walk: See `UntunedScalars`. A tensor that has not moved is left out.
        eligible: See `eligible_tensors`.
        xp: The arrays' library.
    """
    valid = (walk > INITIAL_WALK) & (ratio < _MAX_RATIO)  # NaN compares False
    least = xp.where(eligible & valid, ratio, _MAX_RATIO).min()
    above_1 = least % _MAX_RATIO - 1.0  # _MAX_RATIO, if no tensor has moved, becomes 0
    return 1.0 + (above_1 + abs(above_1)) / 2.0  # `clip` takes NumPy ten times as long


def next_evidence(scalars: UntunedScalars, weight: Array, agreement: Array) -> Array:
    """Return E after a step of weight k: E + k A^2. Nothing is forgotten.

    In a network only the first steps agree, and the bound that E lifts matters for hundreds more.
    By then they turn around as often as noise does, so that a rule that forgets E slows both down.
    """
    return scalars.evidence + weight * agreement**2


def after_step(
    scalars: UntunedScalars,
    *,
    step_size: Array,
    alpha: Array,
    mean_square: Array,
    displacement: Array,
    eligible: Array,
    xp: Library,
) -> UntunedScalars:
    """Return the scalars after a step, from what the step has measured.

    Args:
        scalars: Those before the step.
        step_size: eta of the step.
        alpha: eta times the group's own factors.
        mean_square: The mean of u^2: 1 for an ordinary step, near 0 if most of the tensor had no
            gradient. A step counts as this much of one, and as one at most.
        displacement: The RMS of z - z_1 over the sample.
        eligible: See `eligible_tensors`.
        xp: The arrays' library.
    """
    ceiling = scalars.ceiling
    weight = mean_square.clip(max=1.0)
    walk = scalars.walk + (alpha / ceiling) ** 2 * mean_square
    ratio = displacement_ratio(displacement / ceiling, walk)
    least = least_ratio(ratio, walk, eligible, xp)
    return UntunedScalars(
        step=scalars.step + 1.0,
        step_size=step_size,
        # Below R or, while the steps agree, below R sqrt(1 + A), about R sqrt(t) at most: r does
        # not feed itself.
        distance=xp.minimum(
            xp.maximum(scalars.distance, grown_distance(displacement, ratio)),
            ceiling * least**0.5,
        ),
        ceiling=ceiling,
        effective_steps=_add(scalars.effective_steps, weight),
        walk=walk,
        evidence=next_evidence(scalars, weight, least - 1.0),
    )


def _add(total: Sum, term: Array) -> Sum:
    """Add; in float32, which alone needs it, by Kahan's rule. Cheaper than `Sum.plus`."""
    if total.value.dtype.itemsize > 4:
        return Sum(total.value + term, total.lost)
    term = term + total.lost
    value = total.value + term
    return Sum(value, term - (value - total.value))
