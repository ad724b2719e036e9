"""Problems whose samples are rows of a matrix: non-convex logistic and robust regression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from stormplus.theory.problems.base import Array, Constants, FiniteSum, check_batch_size
from stormplus.theory.problems.bounded import WELL_CURVATURE, WELL_SLOPE


class _Rows(FiniteSum):
    """Samples are rows a_i of a matrix with a target y_i each."""

    def __init__(self, features: ArrayLike, targets: ArrayLike, batch_size: int) -> None:
        a, y = np.asarray(features, np.float64), np.asarray(targets, np.float64)
        if a.ndim != 2 or y.shape != a.shape[:1]:
            raise ValueError(
                f"features must be a matrix, targets one number per row, got {a.shape}, {y.shape}"
            )
        self.n_samples, self.dim = a.shape
        self.batch_size = check_batch_size(batch_size)
        self.data = {"features": a, "targets": y}
        row_sq = (a * a).sum(1)
        self.row_sq_max, self.row_sq_mean = float(row_sq.max()), float(row_sq.mean())

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        return np.zeros(self.dim)


class NonConvexLogistic(_Rows):
    """Logistic regression with the bounded regulariser weight * sum_j x_j^2 / (1 + x_j^2).

    L and G are bounds for every x. B does not exist: a logistic loss grows without limit.
    From x = 0, f(x_1) - inf f <= log 2.

    Args:
        features: One row per sample.
        targets: Labels -1 and 1.
        weight: Of the regulariser.
        batch_size: Rows per sample.
    """

    def __init__(
        self,
        features: ArrayLike,
        targets: ArrayLike,
        *,
        weight: float = 0.1,
        batch_size: int = 1,
    ) -> None:
        super().__init__(features, targets, batch_size)
        labels = np.unique(self.data["targets"])
        if not np.isin(labels, (-1.0, 1.0)).all():
            raise ValueError(f"targets must be -1 or 1, got {labels}")
        self.weight = weight
        self.constants = Constants(
            smoothness=self.row_sq_max / 4 + weight * WELL_CURVATURE,
            grad_bound=math.sqrt(self.row_sq_max) + weight * WELL_SLOPE * math.sqrt(self.dim),
            noise=math.sqrt(self.row_sq_mean / batch_size),
        )

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        margin = data["targets"][xi] * (data["features"][xi] @ x)
        regulariser = (x * x / (1 + x * x)).sum()
        return xp.logaddexp(0 * margin, -margin).mean() + self.weight * regulariser

    def grad(self, x: Array, xi: Any) -> Array:
        a, y = self.data["features"][xi], self.data["targets"][xi]
        pull = -y * expit(-y * (a @ x)) / len(y)
        g: Array = pull @ a + self.weight * 2 * x / (1 + x * x) ** 2
        return g


class RobustRegression(_Rows):
    """Regression with the bounded loss rho(r) = r^2 / (1 + r^2), r = (a_i x - y_i) / scale.

    An outlier costs at most 1. Every constant of the paper is known.

    Args:
        features: One row per sample.
        targets: One number per row.
        scale: Residuals well above it count as outliers.
        batch_size: Rows per sample.
    """

    def __init__(
        self,
        features: ArrayLike,
        targets: ArrayLike,
        *,
        scale: float = 1.0,
        batch_size: int = 1,
    ) -> None:
        super().__init__(features, targets, batch_size)
        self.scale = scale
        self.constants = Constants(
            smoothness=WELL_CURVATURE * self.row_sq_max / scale**2,
            grad_bound=WELL_SLOPE * math.sqrt(self.row_sq_max) / scale,
            noise=WELL_SLOPE * math.sqrt(self.row_sq_mean / batch_size) / scale,
            value_range=1.0,
        )

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        r = (data["features"][xi] @ x - data["targets"][xi]) / self.scale
        return (r * r / (1 + r * r)).mean()

    def grad(self, x: Array, xi: Any) -> Array:
        a = self.data["features"][xi]
        r = (a @ x - self.data["targets"][xi]) / self.scale
        pull = 2 * r / (1 + r * r) ** 2 / (self.scale * len(r))
        g: Array = pull @ a
        return g


def outlier_regression(
    n_samples: int = 500, dim: int = 10, outliers: float = 0.2, *, seed: int = 0
) -> tuple[RobustRegression, Array]:
    """A regression with gross outliers, and the coefficients behind it."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(dim)
    a = rng.standard_normal((n_samples, dim))
    y = a @ truth
    broken = rng.random(n_samples) < outliers
    y[broken] += 20 * rng.standard_normal(broken.sum())
    return RobustRegression(a, y, scale=1.0), truth
