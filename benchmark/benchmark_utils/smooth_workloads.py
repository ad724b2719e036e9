"""The smooth problems, with unseen data beside them where that makes sense."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits

from benchmark_utils.workload import Smooth
from stormplus.theory.problems import (
    FiniteSum,
    MatrixCompletion,
    NonConvexLogistic,
    PhaseRetrieval,
    digit_image,
    digits_nmf,
    sample_image,
)

BUDGET = 1500
BATCH = 16


def _signs(problem: FiniteSum, x: Any) -> float:
    return float((np.sign(problem.data["features"] @ x) == problem.data["targets"]).mean())


def _logistic(name: str, features: Any, positive: Any) -> Smooth:
    rng = np.random.default_rng(0)
    order = rng.permutation(len(features))
    train, valid = np.split(order, [len(order) * 4 // 5])
    spread = features[train].std(0)
    a = (features[:, spread > 0] - features[train][:, spread > 0].mean(0)) / spread[spread > 0]
    a = np.column_stack([a, np.ones(len(a))])
    y = 2.0 * positive - 1
    seen, unseen = (
        NonConvexLogistic(a[part], y[part], weight=0.01, batch_size=BATCH)
        for part in (train, valid)
    )
    return Smooth(name, seen, unseen, _signs, budget=BUDGET)


def logistic_breast_cancer() -> Smooth:
    bunch = load_breast_cancer()
    return _logistic("logistic-breast-cancer", bunch.data, bunch.target)


def logistic_digits() -> Smooth:
    """Odd against even."""
    bunch = load_digits()
    return _logistic("logistic-digits", bunch.data, bunch.target % 2)


def phase_retrieval() -> Smooth:
    """One digit from Gaussian intensities; unseen measurements for validation."""
    truth = digit_image(0).ravel()
    truth = truth / np.sqrt((truth * truth).mean())
    rng = np.random.default_rng(0)
    a = rng.standard_normal((10 * truth.size, truth.size)) / np.sqrt(truth.size)
    y = (a @ truth) ** 2
    cut = 8 * truth.size
    seen = PhaseRetrieval(a[:cut], y[:cut], batch_size=BATCH)
    unseen = PhaseRetrieval(a[cut:], y[cut:], batch_size=BATCH)
    return Smooth("phase-retrieval", seen, unseen, budget=BUDGET)


def nmf() -> Smooth:
    """Every column has a code of its own: nothing is left unseen."""
    return Smooth("nmf", digits_nmf(), budget=BUDGET)


def matrix_completion() -> Smooth:
    """An image from half of its pixels; the other half for validation."""
    image = sample_image("china", shrink=8)
    mask = np.random.default_rng(0).random(image.shape) < 0.5
    seen, unseen = (
        MatrixCompletion(image.shape, np.argwhere(m), image[m], 5, batch_size=64)
        for m in (mask, ~mask)
    )
    return Smooth("matrix-completion", seen, unseen, budget=BUDGET)


MAKERS = {
    "logistic-breast-cancer": logistic_breast_cancer,
    "logistic-digits": logistic_digits,
    "phase-retrieval": phase_retrieval,
    "nmf": nmf,
    "matrix-completion": matrix_completion,
}
