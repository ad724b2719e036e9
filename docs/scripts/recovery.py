"""Recovered images beside the truth: phase retrieval, matrix completion, NMF.

    python docs/scripts/recovery.py

Writes `docs/figures/recovery.png` and `docs/results/recovery.json`; under a minute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stormplus import minimize
from stormplus.theory.problems import (
    PhaseRetrieval,
    digit_phase_retrieval,
    digits_nmf,
    image_completion,
)
from stormplus.theory.rates import versions

DOCS = Path(__file__).parents[1]


def solve(problem: Any, steps: int, lr: float) -> Any:
    return minimize(problem.grad, problem.start(), problem.sample, steps, lr=lr, rng=0).x


def in_other_units(problem: PhaseRetrieval, factor: float) -> PhaseRetrieval:
    """The same measurements of an image `factor` times smaller, by rows that much longer."""
    a, y = problem.data["measurements"], problem.data["squares"]
    return PhaseRetrieval(factor * a, y, batch_size=problem.batch_size)


def main() -> None:
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    rows = figure.subplots(3, 5)
    numbers: dict[str, Any] = {"command": "python docs/scripts/recovery.py", "seed": 0}

    phase, truth = digit_phase_retrieval()
    x = solve(phase, 3000, 3.0)
    x = x * np.sign(x @ truth)
    start = phase.start()
    start = start * np.sign(start @ truth)
    errors = {}
    # x' = x / 8 asks for 8^(-4/3) = 1/16 of the learning rate (docs/theory.md).
    for name, factor, rate in (
        ("as stated", 1.0, 1.0),
        ("x in units 8 times as large", 8.0, 1.0),
        ("the same, lr / 16", 8.0, 1 / 16),
    ):
        other = in_other_units(phase, factor)
        for lr in (0.1, 0.3, 1.0, 3.0):
            found = factor * solve(other, 3000, lr * rate)
            errors[f"{name}, lr {lr:g}"] = phase.error(found, truth)
    numbers["phase retrieval, relative error"] = {k: float(f"{v:.3g}") for k, v in errors.items()}
    show(
        rows[0],
        [
            (truth.reshape(8, 8), "truth (digit)"),
            (start.reshape(8, 8), f"spectral start\nerror {phase.error(start, truth):.2f}"),
            (x.reshape(8, 8), f"STORM+, 3,000 samples\nerror {phase.error(x, truth):.0e}"),
        ],
    )
    rows[0, 0].set_ylabel("phase\nretrieval")

    completion, image = image_completion(rank=10)
    mask = np.zeros(image.shape, bool)
    mask[tuple(completion.data["indices"].T)] = True
    x = solve(completion, 6000, 6.0)
    found = completion.matrix(x)
    left, size, right = np.linalg.svd(image, full_matrices=False)
    best = left[:, :10] * size[:10] @ right[:10]

    def error(matrix: Any) -> float:
        return float(np.linalg.norm((matrix - image)[~mask]) / np.linalg.norm(image[~mask]))

    filled = completion.matrix(completion.start())
    numbers["matrix completion, relative error on unseen pixels"] = {
        "start": round(error(filled), 4),
        "storm+": round(error(found), 4),
        "best of rank 10, all pixels known": round(error(best), 4),
    }
    show(
        rows[1],
        [
            (image, "truth (china)"),
            (np.where(mask, image, np.nan), "seen: half the pixels"),
            (filled, f"spectral start\nerror {error(filled):.2f}"),
            (found, f"STORM+, rank 10\nerror {error(found):.2f}"),
            (best, f"best of rank 10\nerror {error(best):.2f}"),
        ],
    )
    rows[1, 0].set_ylabel("matrix\ncompletion")

    nmf = digits_nmf()
    w, h = nmf.factors(solve(nmf, 10_000, 3.0))
    v = nmf.data["columns"].T
    numbers["nmf, relative error"] = round(float(np.linalg.norm(w @ h - v) / np.linalg.norm(v)), 4)
    parts = w / w.max(0)
    tile = np.block([[parts[:, 2 * i + j].reshape(8, 8) for i in range(5)] for j in range(2)])
    show(
        rows[2],
        [
            (v[:, 1].reshape(8, 8), "truth (digit)"),
            ((w @ h)[:, 1].reshape(8, 8), "STORM+, rank 10"),
            (v[:, 5].reshape(8, 8), "truth (digit)"),
            ((w @ h)[:, 5].reshape(8, 8), "STORM+, rank 10"),
            (tile, "the ten parts (W)"),
        ],
    )
    rows[2, 0].set_ylabel("NMF")
    figure.savefig(DOCS / "figures" / "recovery.png", dpi=90)
    numbers["versions"] = versions()
    (DOCS / "results" / "recovery.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(json.dumps(numbers, indent=1))


def show(axes: Any, images: list[tuple[Any, str]]) -> None:
    for axis, (image, title) in zip(axes, images):
        axis.imshow(image, cmap="gray")
        axis.set_title(title, fontsize=9)
    for axis in axes:
        axis.set(xticks=[], yticks=[])
        axis.set_frame_on(False)
        if not axis.images:
            axis.set_visible(False)


if __name__ == "__main__":
    main()
