"""Two factorizations: non-negative (NMF) and of a matrix with missing entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stormplus.theory.problems.base import Array, FiniteSum


class _Factorization(FiniteSum):
    """x holds two factors with `rank` columns, one after the other. A quartic: no constants."""

    def __init__(
        self, shape: tuple[int, int], rank: int, n_samples: int, batch_size: int, **data: Any
    ) -> None:
        super().__init__(n_samples, rank * sum(shape), batch_size, **data)
        self.shape, self.rank = shape, rank
        self.first_size = shape[0] * rank  # of the first factor

    def _split(self, x: Any) -> tuple[Any, Any]:
        """Return one factor with a row per row of the matrix, one with a row per column."""
        first, second = x[: self.first_size], x[self.first_size :]
        return first.reshape(-1, self.rank), second.reshape(-1, self.rank)


class NonNegativeFactorization(_Factorization):
    """V = W H with W, H >= 0; a sample is a batch of columns of V.

    f_j = |V_j - W h_j|^2 / (2 m), with W = U*U and H = sqrt(n) Z*Z elementwise, U and Z free. The
    factor sqrt(n) makes the gradients of U and Z of like size (one sample in n sees a column of Z).
    A zero of U or Z is stationary in its coordinate, so `start` has none.
    """

    def __init__(self, matrix: ArrayLike, rank: int, *, batch_size: int = 32) -> None:
        v = np.asarray(matrix, np.float64)
        if v.ndim != 2 or (v < 0).any():
            raise ValueError("matrix must be two-dimensional and have no negative entry")
        rows, columns = v.shape
        super().__init__(
            (rows, columns), rank, columns, batch_size, columns=np.ascontiguousarray(v.T)
        )
        self.stretch = float(np.sqrt(columns))

    def factors(self, x: Array) -> tuple[Array, Array]:
        """Return W and H, which have no negative entry."""
        u, z = self._split(x)
        return u * u, self.stretch * (z * z).T

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        u, z = self._split(x)
        h = self.stretch * z[xi] ** 2
        residual = h @ (u * u).T - data["columns"][xi]
        return (residual * residual).sum() / (2 * self.shape[0] * len(xi))

    def grad(self, x: Array, xi: Any) -> Array:
        u, z = self._split(x)
        w, z_xi = u * u, z[xi]
        h = self.stretch * z_xi**2
        residual = (h @ w.T - self.data["columns"][xi]) / (self.shape[0] * len(xi))
        grad_z = np.zeros_like(z)
        # A column drawn twice counts twice.
        np.add.at(grad_z, xi, 2 * self.stretch * z_xi * (residual @ w))
        return np.concatenate([(2 * u * (residual.T @ h)).ravel(), grad_z.ravel()])

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        """Return positive factors of the size of the data: W H has the mean of V."""
        level = (self.data["columns"].mean() / self.rank) ** 0.5
        noise = np.random.default_rng(rng).uniform(0.5, 1.5, self.dim)
        noise[: self.first_size] *= level**0.5
        noise[self.first_size :] *= (level / self.stretch) ** 0.5
        return noise


class MatrixCompletion(_Factorization):
    """M = U V^T seen at some entries only; a sample is a batch of seen entries.

    f_(i,j) = sqrt(m) (u_i v_j - M_ij)^2 / 2 for M with m rows. The factor keeps the norm of
    the gradient from fading as the matrix grows. `indices` has one row (i, j) per seen entry.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        indices: NDArray[np.integer[Any]],
        entries: ArrayLike,
        rank: int,
        *,
        batch_size: int = 256,
    ) -> None:
        pairs, values = np.asarray(indices, np.int64), np.asarray(entries, np.float64)
        if pairs.shape != (len(values), 2):
            raise ValueError(
                f"indices must be one row (i, j) per entry, got {pairs.shape} for {values.shape}"
            )
        super().__init__(shape, rank, len(values), batch_size, indices=pairs, entries=values)
        self.factor = float(np.sqrt(shape[0]))

    def matrix(self, x: Array) -> Array:
        """Return U V^T: every entry, seen or not."""
        u, v = self._split(x)
        product: Array = u @ v.T
        return product

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        u, v = self._split(x)
        i, j = data["indices"][xi].T
        residual = (u[i] * v[j]).sum(-1) - data["entries"][xi]
        return self.factor * (residual * residual).mean() / 2

    def grad(self, x: Array, xi: Any) -> Array:
        u, v = self._split(x)
        i, j = self.data["indices"][xi].T
        residual = (u[i] * v[j]).sum(-1, keepdims=True) - self.data["entries"][xi][:, None]
        residual *= self.factor / len(xi)
        grad_u, grad_v = np.zeros_like(u), np.zeros_like(v)
        np.add.at(grad_u, i, residual * v[j])  # a row seen twice counts twice
        np.add.at(grad_v, j, residual * u[i])
        return np.concatenate([grad_u.ravel(), grad_v.ravel()])

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        """Return the leading singular vectors of the seen entries, the others filled with 0.

        Entries are divided by the fraction seen, which makes the filled matrix unbiased.
        """
        i, j = self.data["indices"].T
        filled = np.zeros(self.shape)
        filled[i, j] = self.data["entries"]
        filled *= filled.size / self.n_samples
        left, singular_values, right = np.linalg.svd(filled, full_matrices=False)
        root = np.sqrt(singular_values[: self.rank])
        u, v = left[:, : self.rank] * root, right[: self.rank].T * root
        return np.concatenate([u.ravel(), v.ravel()])


def masked_matrix(
    matrix: ArrayLike, rank: int, *, seen: float = 0.5, seed: int = 0, batch_size: int = 256
) -> tuple[MatrixCompletion, NDArray[np.bool_]]:
    """Return the completion of `matrix` from a random fraction `seen` of it, and the mask."""
    full = np.asarray(matrix, np.float64)
    mask = np.random.default_rng(seed).random(full.shape) < seen
    rows, columns = full.shape
    problem = MatrixCompletion(
        (rows, columns), np.argwhere(mask), full[mask], rank, batch_size=batch_size
    )
    return problem, mask
