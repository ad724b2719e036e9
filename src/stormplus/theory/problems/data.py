"""Problems on real data that ships inside scikit-learn: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from stormplus.install import required
from stormplus.theory.problems.base import Array
from stormplus.theory.problems.factor import NonNegativeFactorization
from stormplus.theory.problems.rows import NonConvexLogistic


def _datasets() -> Any:
    with required("theory"):
        from sklearn import datasets
    return datasets


def breast_cancer(*, weight: float = 0.1, batch_size: int = 1) -> NonConvexLogistic:
    """Return logistic regression on the breast-cancer data (569 rows, 31 columns).

    The columns are standardised, and one of ones is added.
    """
    bunch = _datasets().load_breast_cancer()
    a = (bunch.data - bunch.data.mean(0)) / bunch.data.std(0)
    a = np.column_stack([a, np.ones(len(a))])
    return NonConvexLogistic(a, 2.0 * bunch.target - 1, weight=weight, batch_size=batch_size)


def digit_image(index: int = 0) -> Array:
    """Return one 8 by 8 digit, pixels in [0, 1]."""
    image: Array = _datasets().load_digits().images[index] / 16
    return image


def sample_image(name: str = "china", *, shrink: int = 4) -> Array:
    """Return scikit-learn's "china" or "flower" in grey, pixels in [0, 1].

    A pixel is the mean over a square of `shrink` by `shrink` of the photograph.
    """
    grey = _datasets().load_sample_image(f"{name}.jpg").mean(-1) / 255
    rows, columns = (size // shrink for size in grey.shape)
    squares = grey[: rows * shrink, : columns * shrink].reshape(rows, shrink, columns, shrink)
    image: Array = squares.mean((1, 3))
    return image


def digits_nmf(*, rank: int = 10, images: int = 500) -> NonNegativeFactorization:
    """Return NMF of the first `images` digits, one image per column."""
    return NonNegativeFactorization(_datasets().load_digits().data[:images].T / 16, rank)
