"""Base classes of the problems: `Objective`, and `FiniteSum` for data sets.

A problem defines its loss once, in operations that NumPy and torch share, and its gradient once, by
hand, in NumPy. As a torch module (`Objective.module`) it has gradients from autograd; the tests
compare the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stormplus.theory.problems.module import ProblemModule

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Constants:
    """The constants of the paper's Sec. 3; None where no finite bound is known."""

    smoothness: float | None = None  # L, of every sample's loss
    grad_bound: float | None = None  # G, on every sample's gradient
    noise: float | None = None  # sigma, on the root of E|grad f(x; xi) - grad f(x)|^2
    value_range: float | None = None  # B, on |f(x) - f(y)|


class Objective(ABC):
    """f(x) = E[f(x; xi)] with an exact gradient, and constants where they are known."""

    dim: int  # the number of unknowns; x is a vector
    constants: Constants
    data: Mapping[str, NDArray[Any]]  # the arrays that the loss reads
    full_sample: Any  # the xi with f(x; xi) = f(x)

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> Any:
        """Draw one xi."""

    @abstractmethod
    def loss(self, x: Any, xi: Any, data: Mapping[str, Any], xp: Any) -> Any:
        """Return f(x; xi), in the operations of `xp` (numpy or torch)."""

    @abstractmethod
    def grad(self, x: Array, xi: Any) -> Array:
        """Return the gradient of f(.; xi) at x."""

    @abstractmethod
    def start(self, rng: np.random.Generator | int = 0) -> Array:
        """Return a point to start from."""

    def value(self, x: Array, xi: Any) -> Any:
        """Return f(x; xi), a NumPy number."""
        return self.loss(x, xi, self.data, np)

    def full_grad(self, x: Array) -> Array:
        """Return the exact gradient of f at x."""
        return self.grad(x, self.full_sample)

    def full_value(self, x: Array) -> Any:
        """Return f(x), exactly."""
        return self.value(x, self.full_sample)

    def module(self, x: Array | None = None) -> ProblemModule:
        """Return a torch module with the parameter `x`; calling it with xi returns f(x; xi)."""
        from stormplus.theory.problems.module import ProblemModule

        return ProblemModule(self, self.start() if x is None else x)


class FiniteSum(Objective):
    """f(x) = (1/n) sum_i f_i(x); a sample is a batch of indices.

    They are drawn with replacement: the paper's samples are independent.
    """

    def __init__(self, n_samples: int, dim: int, batch_size: int, **data: NDArray[Any]) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.n_samples, self.dim, self.batch_size = n_samples, dim, batch_size
        self.data, self.constants, self.full_sample = data, Constants(), np.arange(n_samples)

    def sample(self, rng: np.random.Generator, size: int | None = None) -> NDArray[np.int64]:
        """Draw `size` indices, by default `batch_size`."""
        return rng.integers(self.n_samples, size=self.batch_size if size is None else size)
