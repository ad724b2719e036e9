"""Matrix completion: the missing half of a picture, by STORM+ and by what one would use instead.

    python examples/matrix_completion.py [--ranks 2 5 10] [--samples N]

Half the pixels of a photograph that ships inside scikit-learn (106 by 160) are hidden. Each
method sees the other half and is judged by the root mean square error on the hidden ones,
pixels being in [0, 1]. Seen: one table. The methods that know no rank come first; "best,
nothing hidden" is the truncated SVD of the whole picture, which nobody can beat on all of
it. Alternating least squares solves for each row exactly and is the method to use on a
problem of this size; STORM+ sees 256 pixels at a time and never forms the matrix.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from stormplus import minimize
from stormplus.theory.problems import MatrixCompletion, masked_matrix, sample_image

Array = NDArray[np.float64]


def row_and_column_means(image: Array, seen: NDArray[np.bool_]) -> Array:
    """An additive model of the seen entries, by alternating means."""
    rows, columns = np.zeros((len(image), 1)), np.zeros((1, image.shape[1]))
    for _ in range(20):
        rows = np.mean(image - columns, axis=1, keepdims=True, where=seen)
        columns = np.mean(image - rows, axis=0, keepdims=True, where=seen)
    return rows + columns


def truncated(matrix: Array, rank: int) -> Array:
    left, size, right = np.linalg.svd(matrix, full_matrices=False)
    product: Array = left[:, :rank] * size[:rank] @ right[:rank]
    return product


def alternating_least_squares(
    image: Array, seen: NDArray[np.bool_], start: Array, rank: int, ridge: float = 0.05
) -> Array:
    """ALS from the same start, 30 rounds, with a small ridge that keeps each solve regular."""
    left, size, right = np.linalg.svd(start, full_matrices=False)
    u, v = left[:, :rank] * size[:rank], right[:rank].T

    def solve(known: Array, mask: NDArray[np.bool_], other: Array) -> Array:
        normal = np.einsum("ij,jr,js->irs", mask, other, other) + ridge * np.eye(rank)
        return np.linalg.solve(normal, ((mask * known) @ other)[..., None])[..., 0]

    for _ in range(30):
        u = solve(image, seen, v)
        v = solve(image.T, seen.T, u)
    return u @ v.T


def storm_plus(problem: MatrixCompletion, samples: int, lr: float) -> Array:
    found = minimize(problem.grad, problem.start(), problem.sample, samples, lr=lr, rng=0)
    return problem.matrix(found.x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--samples", type=int, default=8000, help="batches of 256 pixels")
    parser.add_argument("--lr", type=float, default=6.0)
    args = parser.parse_args()
    image = sample_image("china")
    seen = masked_matrix(image, 1)[1]

    def score(matrix: Array) -> str:
        return f"{np.sqrt(np.mean((matrix - image) ** 2, where=~seen)):.4f}"

    table = Table(title=f"RMSE on the {np.sum(~seen)} hidden pixels")
    table.add_column("method")
    for rank in args.ranks:
        table.add_column(f"rank {rank}", justify="right")
    mean = np.full_like(image, image[seen].mean())
    table.add_row("mean of the seen pixels", *[score(mean)] * len(args.ranks))
    additive = row_and_column_means(image, seen)
    table.add_row("row and column means", *[score(additive)] * len(args.ranks))
    rows: dict[str, list[str]] = {}
    for rank in args.ranks:
        problem = masked_matrix(image, rank)[0]
        start = problem.matrix(problem.start())
        for name, matrix in {
            "spectral start": start,
            f"STORM+, {args.samples} samples": storm_plus(problem, args.samples, args.lr),
            "alternating least squares": alternating_least_squares(image, seen, start, rank),
            "best, nothing hidden": truncated(image, rank),
        }.items():
            rows.setdefault(name, []).append(score(matrix))
    for name, scores in rows.items():
        table.add_row(name, *scores)
    Console().print(table)


if __name__ == "__main__":
    main()
