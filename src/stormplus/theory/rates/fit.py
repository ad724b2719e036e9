"""Slopes on log-log scales, with confidence intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stormplus.theory.problems.base import Array


class Slope(NamedTuple):
    """A slope and its 95 % interval over seeds."""

    value: float
    low: float
    high: float


def slope(
    T: NDArray[np.int64],
    runs: Array,
    window: tuple[int, int],
    *,
    root: bool = False,
    resamples: int = 1000,
    seed: int = 0,
) -> Slope:
    """The slope of log(mean over seeds) against log T, by least squares over a window.

    The interval is the percentile bootstrap over seeds: runs are resampled whole, because
    the points of one curve are not independent.

    Args:
        T: The checkpoints.
        runs: Over (checkpoint, seed).
        window: First and last T used.
        root: Take the root of the mean: `runs` are squares, and the slope is of the RMS.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    inside = (window[0] <= T) & (window[1] >= T)
    log_t = np.log(T[inside])
    log_t -= log_t.mean()
    weights = log_t / (log_t @ log_t)
    chosen = runs[inside]
    count = chosen.shape[1]
    picks = np.random.default_rng(seed).integers(count, size=(resamples, count))
    # Row 0 is the sample itself.
    curves = np.vstack([chosen.mean(1), chosen[:, picks].mean(2).T])
    slopes = np.log(curves) @ weights * (0.5 if root else 1.0)
    low, high = np.quantile(slopes[1:], [0.025, 0.975])
    return Slope(float(slopes[0]), float(low), float(high))
