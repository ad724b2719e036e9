"""Problems whose samples are rows of a matrix: two regressions, and phase retrieval."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from stormplus.theory.problems.base import Array, Constants, FiniteSum
from stormplus.theory.problems.bounded import WELL_CURVATURE, WELL_SLOPE


class RowProblem(FiniteSum):
    """f_i(x) = phi(a_i x, y_i): a row a_i of a matrix and a target y_i per sample."""

    def __init__(self, features: ArrayLike, targets: ArrayLike, batch_size: int) -> None:
        a, y = np.asarray(features, np.float64), np.asarray(targets, np.float64)
        if a.ndim != 2 or y.shape != a.shape[:1]:
            raise ValueError(f"need a matrix and one number per row, got {a.shape} and {y.shape}")
        super().__init__(a.shape[0], a.shape[1], batch_size, features=a, targets=y)
        row_sq = (a * a).sum(1)
        self.row_sq_max, self.row_sq_mean = float(row_sq.max()), float(row_sq.mean())

    @abstractmethod
    def phi(self, product: Any, y: Any, xp: Any) -> Any:
        """Return the loss of every row, in the operations of `xp`."""

    @abstractmethod
    def phi_slope(self, product: Array, y: Array) -> Array:
        """Return the derivative of phi by a_i x, of every row."""

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        return self.phi(data["features"][xi] @ x, data["targets"][xi], xp).mean()

    def grad(self, x: Array, xi: Any) -> Array:
        a, y = self.data["features"][xi], self.data["targets"][xi]
        g: Array = (self.phi_slope(a @ x, y) / len(y)) @ a
        return g

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        return np.zeros(self.dim)


class NonConvexLogistic(RowProblem):
    """Logistic regression with the bounded regularizer weight * sum_j x_j^2 / (1 + x_j^2).

    Targets are -1 and 1. L and G are bounds for every x. B does not exist: a logistic loss grows
    without limit. From x = 0, f(x_1) - inf f <= log 2.
    """

    def __init__(
        self, features: ArrayLike, targets: ArrayLike, *, weight: float = 0.1, batch_size: int = 1
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

    def phi(self, product: Any, y: Any, xp: Any) -> Any:
        margin = y * product
        return xp.logaddexp(0 * margin, -margin)

    def phi_slope(self, product: Array, y: Array) -> Array:
        return -y * expit(-y * product)

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        return super().loss(x, xi, data, xp) + self.weight * (x * x / (1 + x * x)).sum()

    def grad(self, x: Array, xi: Any) -> Array:
        return super().grad(x, xi) + self.weight * 2 * x / (1 + x * x) ** 2


class RobustRegression(RowProblem):
    """Regression with the bounded loss rho(r) = r^2 / (1 + r^2), r = (a_i x - y_i) / scale.

    Residuals well above `scale` are outliers, and cost at most 1. Every constant of the paper is
    known.
    """

    def __init__(
        self, features: ArrayLike, targets: ArrayLike, *, scale: float = 1.0, batch_size: int = 1
    ) -> None:
        super().__init__(features, targets, batch_size)
        self.scale = scale
        self.constants = Constants(
            smoothness=WELL_CURVATURE * self.row_sq_max / scale**2,
            grad_bound=WELL_SLOPE * math.sqrt(self.row_sq_max) / scale,
            noise=WELL_SLOPE * math.sqrt(self.row_sq_mean / batch_size) / scale,
            value_range=1.0,
        )

    def phi(self, product: Any, y: Any, xp: Any) -> Any:
        r = (product - y) / self.scale
        return r * r / (1 + r * r)

    def phi_slope(self, product: Array, y: Array) -> Array:
        r = (product - y) / self.scale
        return 2 * r / (1 + r * r) ** 2 / self.scale


class PhaseRetrieval(RowProblem):
    """f_i(x) = ((a_i x)^2 - y_i)^2 / 4, with y_i = (a_i x*)^2; x* and -x* are solutions.

    A quartic is neither bounded nor smooth on the whole space, so `constants` are None. `start`
    is the spectral initialization, the leading eigenvector of sum_i y_i a_i a_i^T.
    """

    def __init__(
        self, measurements: ArrayLike, squares: ArrayLike, *, batch_size: int = 32
    ) -> None:
        super().__init__(measurements, squares, batch_size)
        if (self.data["targets"] < 0).any():
            raise ValueError("squares must not be negative")

    def phi(self, product: Any, y: Any, xp: Any) -> Any:
        misfit = product**2 - y
        return misfit * misfit / 4

    def phi_slope(self, product: Array, y: Array) -> Array:
        return (product * product - y) * product

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        a, y = self.data["features"], self.data["targets"]
        v: Array = np.random.default_rng(rng).standard_normal(self.dim)
        for _ in range(100):  # power iteration
            v = a.T @ (y * (a @ v))
            v /= np.linalg.norm(v)
        # E y = |x*|^2 E|a|^2 / dim for rows without a preferred direction.
        return v * float(np.sqrt(y.sum() * self.dim / (a * a).sum()))

    @staticmethod
    def error(x: Array, truth: Array) -> float:
        """Return |x - x*| / |x*|, up to the sign that no measurement shows."""
        distance = min(float(np.linalg.norm(x - truth)), float(np.linalg.norm(x + truth)))
        return distance / float(np.linalg.norm(truth))


def outlier_regression(
    n_samples: int = 500, dim: int = 10, outliers: float = 0.2, *, seed: int = 0
) -> tuple[RobustRegression, Array]:
    """Return a regression with gross outliers, and the coefficients behind it."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(dim)
    a = rng.standard_normal((n_samples, dim))
    y = a @ truth
    is_outlier = rng.random(n_samples) < outliers
    y[is_outlier] += 20 * rng.standard_normal(is_outlier.sum())
    return RobustRegression(a, y, scale=1.0), truth


def measured_image(
    image: ArrayLike, *, oversampling: float = 8.0, batch_size: int = 32, seed: int = 0
) -> tuple[PhaseRetrieval, Array]:
    """Return phase retrieval of `image` from Gaussian measurements, and the image as a vector.

    Pixels have mean square 1 and rows a_i a length near 1, so gradients are of order 1, where the
    constants 1 of STORM+ fit.
    """
    truth = np.asarray(image, np.float64).ravel()
    truth = truth / np.sqrt((truth * truth).mean())
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((round(oversampling * truth.size), truth.size)) / np.sqrt(truth.size)
    return PhaseRetrieval(a, (a @ truth) ** 2, batch_size=batch_size), truth
