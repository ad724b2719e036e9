"""A problem as a torch module."""

from __future__ import annotations

from typing import Any

import numpy as np

from stormplus.install import required
from stormplus.theory.problems.base import Array, Objective

with required("torch"):
    import torch


class ProblemModule(torch.nn.Module):
    """A module with the parameter `x`, in float64; calling it with a sample returns the loss."""

    def __init__(self, problem: Objective, x: Array) -> None:
        super().__init__()
        self.problem = problem
        self.x = torch.nn.Parameter(torch.tensor(x, dtype=torch.float64))
        for name, array in problem.data.items():
            self.register_buffer(name, self._tensor(array), persistent=False)

    def forward(self, xi: Any) -> torch.Tensor:
        xi = tuple(map(self._tensor, xi)) if isinstance(xi, tuple) else self._tensor(xi)
        loss = self.problem.loss(self.x, xi, dict(self.named_buffers()), torch)
        return torch.as_tensor(loss)

    def _tensor(self, array: Any) -> torch.Tensor:
        if isinstance(array, torch.Tensor):
            return array
        is_float = np.issubdtype(np.asarray(array).dtype, np.floating)
        dtype = self.x.dtype if is_float else torch.int64
        return torch.tensor(array, dtype=dtype, device=self.x.device)
