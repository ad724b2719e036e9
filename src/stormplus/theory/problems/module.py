"""A problem as a torch module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stormplus.install import how_to

try:
    import torch
except ImportError as error:  # pragma: no cover
    raise ImportError(f"`problem.module()` needs torch: {how_to('torch')}") from error

if TYPE_CHECKING:
    from stormplus.theory.problems.base import Objective


class ProblemModule(torch.nn.Module):
    """A module with the parameter `x`; calling it with a sample returns the loss.

    Args:
        problem: Any problem of this package.
        x: The initial value of the parameter.
        dtype: Of the parameter and of the problem's data.
    """

    def __init__(
        self, problem: Objective, x: NDArray[np.float64], dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.problem = problem
        self.x = torch.nn.Parameter(torch.tensor(x, dtype=dtype))
        for name, array in problem.data.items():
            self.register_buffer(name, _tensor(array, dtype), persistent=False)

    def forward(self, xi: Any) -> torch.Tensor:
        data = dict(self.named_buffers())
        loss = self.problem.loss(self.x, _to_torch(xi, self.x), data, torch)
        return torch.as_tensor(loss)


def _tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    is_float = np.issubdtype(array.dtype, np.floating)
    return torch.tensor(array, dtype=dtype if is_float else torch.int64)


def _to_torch(xi: Any, like: torch.Tensor) -> Any:
    if isinstance(xi, np.ndarray):
        return _tensor(xi, like.dtype).to(like.device)
    return tuple(_to_torch(part, like) for part in xi) if isinstance(xi, tuple) else xi
