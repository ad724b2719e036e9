"""Phase retrieval: a picture from the squares of random projections of it, their signs lost.

    python examples/phase_retrieval.py [--image china|flower|digit] [--samples N] [--out DIR]

A 32 by 32 cut of a photograph that ships inside scikit-learn is measured 8,192 times,
y_i = (a_i x)^2 with Gaussian a_i, and recovered by STORM+ from batches of 64 measurements,
beginning at the spectral estimate. Seen: the error falling by orders of magnitude, and
`phase_retrieval.png`: the original, the start, the recovery and what it misses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stormplus import minimize
from stormplus.theory.problems import PhaseRetrieval, digit_image, measured_image, sample_image


def picture(name: str) -> np.ndarray:
    if name == "digit":
        return digit_image()
    image = sample_image(name, shrink=8)
    top, left = (size // 2 - 16 for size in image.shape)
    return image[top : top + 32, left : left + 32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", choices=("china", "flower", "digit"), default="china")
    parser.add_argument("--samples", type=int, default=30_000, help="batches of measurements")
    parser.add_argument("--lr", type=float, default=3.0, help="1 is slower, 10 diverges here")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the figure")
    args = parser.parse_args()

    image = picture(args.image)
    problem, truth = measured_image(image, batch_size=64)
    start = problem.start()
    print(f"{problem.n_samples} measurements of {problem.dim} pixels")
    print("samples  relative error")
    print(f"{0:7d}  {problem.error(start, truth):14.2e}   spectral start")

    def report(result: Any) -> None:
        if result.nit * 6 % args.samples == 0:
            print(f"{result.nit:7d}  {problem.error(result.x, truth):14.2e}")

    found = minimize(
        problem.grad, start, problem.sample, args.samples, lr=args.lr, rng=0, callback=report
    )
    print(f"{found.ngev} gradients, final error {problem.error(found.x, truth):.2e}")
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "phase_retrieval.png"
    draw(target, image, truth, start, found.x)
    print(f"figure: {target}")


def draw(target: Path, image: np.ndarray, truth: np.ndarray, *points: np.ndarray) -> None:
    """The original, both points, and the last one's error, in pixels of [0, 1]."""
    unit = image.ravel() @ truth / (truth @ truth)  # back from mean square 1
    start, found = (
        (unit * np.sign(point @ truth) * point).reshape(image.shape) for point in points
    )
    error = np.abs(found - image)
    shown = [
        (image, "original", 1.0),
        (start, f"spectral start\nerror {PhaseRetrieval.error(points[0], truth):.2f}", 1.0),
        (found, f"STORM+\nerror {PhaseRetrieval.error(points[1], truth):.1e}", 1.0),
        (error, f"|recovered - original|\nwhite = {error.max():.1e}", max(error.max(), 1e-300)),
    ]
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axis, (pixels, title, white) in zip(figure.subplots(1, 4), shown):
        axis.imshow(pixels, cmap="gray", vmin=0, vmax=white)
        axis.set_title(title, fontsize=10)
        axis.set_axis_off()
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    main()
