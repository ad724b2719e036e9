"""Problems to run the theory on: the paper's assumptions met, and its applications.

Synthetic problems come with their solution; those named after data use what ships inside
scikit-learn. A problem of one's own needs `sample` and `grad` only: see `Problem`.
"""

from stormplus.theory.problems.base import Constants, FiniteSum, Objective, Problem
from stormplus.theory.problems.bounded import BoundedNonConvex
from stormplus.theory.problems.data import (
    breast_cancer,
    diabetes_robust,
    digit_image,
    digit_phase_retrieval,
    digits_nmf,
    digits_parity,
    image_completion,
    sample_image,
)
from stormplus.theory.problems.factor import (
    MatrixCompletion,
    NonNegativeFactorisation,
    masked_matrix,
    planted_completion,
    planted_nmf,
)
from stormplus.theory.problems.linear import NonConvexLogistic, RobustRegression, outlier_regression
from stormplus.theory.problems.phase import PhaseRetrieval, measured_image

__all__ = [
    "BoundedNonConvex",
    "Constants",
    "FiniteSum",
    "MatrixCompletion",
    "NonConvexLogistic",
    "NonNegativeFactorisation",
    "Objective",
    "PhaseRetrieval",
    "Problem",
    "RobustRegression",
    "breast_cancer",
    "diabetes_robust",
    "digit_image",
    "digit_phase_retrieval",
    "digits_nmf",
    "digits_parity",
    "image_completion",
    "masked_matrix",
    "measured_image",
    "outlier_regression",
    "planted_completion",
    "planted_nmf",
    "sample_image",
]
