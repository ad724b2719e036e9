"""Base classes of the problems: `Objective`, and `FiniteSum` for data sets.

A problem defines its loss once, in operations that NumPy and torch share, and its gradient once,
by hand, in NumPy. `Objective.module` is the problem as a torch module, with gradients from
autograd; the tests compare the two.
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
    """The constants of the paper's Sec. 3; None where no finite bound is known.

    Attributes:
        smoothness: L, of every sample's loss.
        grad_bound: G, on every sample's gradient.
        noise: sigma, on the root of E|grad f(x; xi) - grad f(x)|^2.
        value_range: B, on |f(x) - f(y)|.
    """

    smoothness: float | None = None
    grad_bound: float | None = None
    noise: float | None = None
    value_range: float | None = None


class Objective(ABC):
    """f(x) = E[f(x; xi)] with an exact gradient, and constants where they are known.

    Attributes:
        dim: The number of unknowns; x is a vector.
        constants: L, G, sigma and B.
        data: The arrays the loss reads, by name.
    """

    dim: int
    constants: Constants
    data: Mapping[str, NDArray[Any]]

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
    def full_grad(self, x: Array) -> Array:
        """Return the exact gradient of f at x."""

    @abstractmethod
    def full_value(self, x: Array) -> float:
        """Return f(x), exactly."""

    @abstractmethod
    def start(self, rng: np.random.Generator | int = 0) -> Array:
        """Return a point to start from."""

    def value(self, x: Array, xi: Any) -> float:
        """Return f(x; xi)."""
        return float(self.loss(x, xi, self.data, np))

    def module(self, x: Array | None = None) -> ProblemModule:
        """Return a torch module with the parameter `x`; calling it with xi returns f(x; xi)."""
        from stormplus.theory.problems.module import ProblemModule

        return ProblemModule(self, self.start() if x is None else x)


class FiniteSum(Objective):
    """f(x) = (1/n) sum_i f_i(x); a sample is a batch of indices drawn with replacement.

    With replacement, because the paper's samples are independent and of one distribution.
    """

    n_samples: int
    batch_size: int

    def sample(self, rng: np.random.Generator) -> NDArray[np.int64]:
        return self.sample_batch(rng, self.batch_size)

    def sample_batch(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw `size` independent indices."""
        return rng.integers(self.n_samples, size=size)

    def full_grad(self, x: Array) -> Array:
        return self.grad(x, np.arange(self.n_samples))

    def full_value(self, x: Array) -> float:
        return self.value(x, np.arange(self.n_samples))


def check_batch_size(batch_size: int) -> int:
    """Return `batch_size` if it is positive."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return batch_size
