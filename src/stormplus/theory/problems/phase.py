"""Phase retrieval: an image from the squares of linear measurements of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stormplus.theory.problems.base import Array, Constants, FiniteSum, check_batch_size


class PhaseRetrieval(FiniteSum):
    """f_i(x) = ((a_i x)^2 - y_i)^2 / 4, with y_i = (a_i x*)^2; x* and -x* are solutions.

    A quartic is neither bounded nor smooth on the whole space, so `constants` are None. `start`
    is the spectral initialisation, the leading eigenvector of sum_i y_i a_i a_i^T.

    Args:
        measurements: One row a_i per measurement.
        squares: The y_i.
        batch_size: Measurements per sample.
    """

    def __init__(
        self, measurements: ArrayLike, squares: ArrayLike, *, batch_size: int = 32
    ) -> None:
        a, y = np.asarray(measurements, np.float64), np.asarray(squares, np.float64)
        if y.shape != a.shape[:1] or (y < 0).any():
            raise ValueError("squares must be one number per measurement, none negative")
        self.n_samples, self.dim = a.shape
        self.batch_size = check_batch_size(batch_size)
        self.data = {"measurements": a, "squares": y}
        self.constants = Constants()

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        misfit = (data["measurements"][xi] @ x) ** 2 - data["squares"][xi]
        return (misfit * misfit).mean() / 4

    def grad(self, x: Array, xi: Any) -> Array:
        a = self.data["measurements"][xi]
        seen = a @ x
        g: Array = ((seen * seen - self.data["squares"][xi]) * seen / len(seen)) @ a
        return g

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        a, y = self.data["measurements"], self.data["squares"]
        v: Array = np.random.default_rng(rng).standard_normal(self.dim)
        for _ in range(100):  # power iteration
            v = a.T @ (y * (a @ v))
            v /= np.linalg.norm(v)
        # E y = |x*|^2 E|a|^2 / dim for rows without a preferred direction.
        return v * float(np.sqrt(y.sum() * self.dim / (a * a).sum()))

    @staticmethod
    def error(x: Array, truth: Array) -> float:
        """|x - x*| / |x*|, up to the sign that no measurement shows."""
        distance = min(float(np.linalg.norm(x - truth)), float(np.linalg.norm(x + truth)))
        return distance / float(np.linalg.norm(truth))


def measured_image(
    image: ArrayLike, *, oversampling: float = 8.0, batch_size: int = 32, seed: int = 0
) -> tuple[PhaseRetrieval, Array]:
    """Phase retrieval of `image` from Gaussian measurements, and the image as a vector.

    The image is scaled to pixels of mean square 1 and the rows a_i to length 1 or so. Then
    y_i and the gradients are of order 1, where the constants 1 of STORM+ fit.
    """
    truth = np.asarray(image, np.float64).ravel()
    truth = truth / np.sqrt((truth * truth).mean())
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((round(oversampling * truth.size), truth.size)) / np.sqrt(truth.size)
    return PhaseRetrieval(a, (a @ truth) ** 2, batch_size=batch_size), truth
