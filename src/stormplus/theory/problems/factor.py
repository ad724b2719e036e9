"""Two factorisations: non-negative (NMF) and of a matrix with missing entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stormplus.theory.problems.base import Array, Constants, FiniteSum, check_batch_size


class NonNegativeFactorisation(FiniteSum):
    """V = W H with W, H >= 0; a sample is a batch of columns of V.

    f_j = |V_j - W h_j|^2 / (2 m). The constraint is removed by a smooth change of
    variables: W = U*U and H = sqrt(n) Z*Z elementwise, with U and Z free. The factor
    sqrt(n) makes the gradients of U and Z of like size (a column of Z is seen by one
    sample in n). A zero of U or Z is a stationary point of its own coordinate, so `start`
    has none. The product is a quartic: no global L, G or B.

    Args:
        matrix: V, m by n, not negative.
        rank: Columns of W.
        batch_size: Columns of V per sample.
    """

    def __init__(self, matrix: ArrayLike, rank: int, *, batch_size: int = 32) -> None:
        v = np.asarray(matrix, np.float64)
        if v.ndim != 2 or (v < 0).any():
            raise ValueError("matrix must be two-dimensional and have no negative entry")
        self.rank, self.batch_size = rank, check_batch_size(batch_size)
        self.rows, self.n_samples = v.shape
        self.dim = rank * (self.rows + self.n_samples)
        self.stretch = float(np.sqrt(self.n_samples))
        self.data = {"columns": np.ascontiguousarray(v.T)}
        self.constants = Constants()

    def _split(self, x: Any) -> tuple[Any, Any]:
        """U (m by r), and Z transposed (n by r), one row per sample."""
        cut = self.rows * self.rank
        return x[:cut].reshape(self.rows, self.rank), x[cut:].reshape(-1, self.rank)

    def factors(self, x: Array) -> tuple[Array, Array]:
        """Return W and H, which have no negative entry."""
        u, z = self._split(x)
        return u * u, self.stretch * (z * z).T

    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        u, z = self._split(x)
        h = self.stretch * z[xi] ** 2
        residual = h @ (u * u).T - data["columns"][xi]
        return (residual * residual).sum() / (2 * self.rows * len(xi))

    def grad(self, x: Array, xi: Any) -> Array:
        u, z = self._split(x)
        w, z_xi = u * u, z[xi]
        h = self.stretch * z_xi**2
        residual = (h @ w.T - self.data["columns"][xi]) / (self.rows * len(xi))
        grad_z = np.zeros_like(z)
        # A column drawn twice counts twice.
        np.add.at(grad_z, xi, 2 * self.stretch * z_xi * (residual @ w))
        return np.concatenate([(2 * u * (residual.T @ h)).ravel(), grad_z.ravel()])

    def start(self, rng: np.random.Generator | int = 0) -> Array:
        """Positive, and of the size of the data: W H has the mean of V."""
        level = (self.data["columns"].mean() / self.rank) ** 0.5
        noise = np.random.default_rng(rng).uniform(0.5, 1.5, self.dim)
        cut = self.rows * self.rank
        noise[:cut] *= level**0.5
        noise[cut:] *= (level / self.stretch) ** 0.5
        return noise


class MatrixCompletion(FiniteSum):
    """M = U V^T seen at some entries only; a sample is a batch of seen entries.

    f_(i,j) = sqrt(m) (u_i v_j - M_ij)^2 / 2 for M with m rows. The factor keeps the norm of
    the gradient from fading as the matrix grows. A quartic: no global L, G or B.

    Args:
        shape: Of M.
        indices: The seen entries, one row (i, j) each.
        entries: Their values.
        rank: Columns of U and V.
        batch_size: Entries per sample.
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
        self.shape, self.rank = shape, rank
        self.batch_size = check_batch_size(batch_size)
        values = np.asarray(entries, np.float64)
        if indices.shape != (len(values), 2):
            raise ValueError(
                f"indices must be one row (i, j) per entry, got {indices.shape} for {values.shape}"
            )
        self.n_samples, self.dim = len(values), rank * sum(shape)
        self.factor = float(np.sqrt(shape[0]))
        self.data = {"indices": np.asarray(indices, np.int64), "entries": values}
        self.constants = Constants()

    def _split(self, x: Any) -> tuple[Any, Any]:
        cut = self.shape[0] * self.rank
        return x[:cut].reshape(-1, self.rank), x[cut:].reshape(-1, self.rank)

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
        """Return the leading singular vectors of the seen entries, missing ones filled with 0.

        Entries are divided by the fraction seen, which makes the filled matrix unbiased.
        """
        i, j = self.data["indices"].T
        filled = np.zeros(self.shape)
        filled[i, j] = self.data["entries"]
        filled *= filled.size / self.n_samples
        left, size, right = np.linalg.svd(filled, full_matrices=False)
        root = np.sqrt(size[: self.rank])
        u, v = left[:, : self.rank] * root, right[: self.rank].T * root
        return np.concatenate([u.ravel(), v.ravel()])


def masked_matrix(
    matrix: ArrayLike, rank: int, *, seen: float = 0.5, seed: int = 0, batch_size: int = 256
) -> tuple[MatrixCompletion, NDArray[np.bool_]]:
    """The completion of `matrix` from a random fraction `seen` of it, and the mask."""
    full = np.asarray(matrix, np.float64)
    mask = np.random.default_rng(seed).random(full.shape) < seen
    rows, columns = full.shape
    problem = MatrixCompletion(
        (rows, columns), np.argwhere(mask), full[mask], rank, batch_size=batch_size
    )
    return problem, mask
