"""Problems for the theory: some meet the paper's assumptions, others are its applications.

Data comes from scikit-learn; nothing is downloaded. `minimize` itself needs no class of this
package, only the functions `sample` and `grad`.
"""

from stormplus.theory.problems.base import Constants, FiniteSum, Objective
from stormplus.theory.problems.bounded import BoundedNonConvex
from stormplus.theory.problems.data import breast_cancer, digit_image, digits_nmf, sample_image
from stormplus.theory.problems.factor import (
    MatrixCompletion,
    NonNegativeFactorization,
    masked_matrix,
)
from stormplus.theory.problems.rows import (
    NonConvexLogistic,
    PhaseRetrieval,
    RobustRegression,
    measured_image,
    outlier_regression,
)

__all__ = [
    "BoundedNonConvex", "Constants", "FiniteSum", "MatrixCompletion", "NonConvexLogistic",
    "NonNegativeFactorization", "Objective", "PhaseRetrieval", "RobustRegression", "breast_cancer",
    "digit_image", "digits_nmf", "masked_matrix", "measured_image", "outlier_regression",
    "sample_image",
]  # fmt: skip
