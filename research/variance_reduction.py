"""Variance reduction on breast-cancer data, drawn by the observer.

    python research/variance_reduction.py

Writes docs/figures/variance_reduction.png; half a minute.
"""

from __future__ import annotations

import numpy as np
from common import DOCS, parser

from stormplus import minimize
from stormplus.theory import Observer
from stormplus.theory.problems import breast_cancer


def main() -> None:
    problem = breast_cancer(batch_size=4)
    observer = Observer(problem.full_grad, window=300, every=20)
    options = {"lr": 0.3, "rng": 0, "callback": observer}
    minimize(observer.watch(problem.grad), problem.start(), problem.sample, 20_000, **options)
    observer.plot().savefig(DOCS / "figures" / "variance_reduction.png", dpi=130)
    error, noise = (
        np.mean([row[name] for row in observer.rows if row["step"] > 15_000])
        for name in ("true_error_sq", "true_noise_sq")
    )
    print(f"squared error, one sample over d, last 5,000 steps: {noise / error:.0f}")


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
