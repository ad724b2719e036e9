"""ScheduleFree+ (Defazio 2026, arXiv 2605.19095), at the defaults of its reference code."""

import math
from typing import Any

import torch

BETAS = (0.9, 0.95)  # of Adam's moments
BETA = 0.9  # y = BETA x + (1 - BETA) z


class ScheduleFreePlus(torch.optim.Optimizer):
    """Schedule-Free AdamW with Polyak's step size, which needs the loss; five buffers.

    With F and g the loss and its gradient at y, over all parameters:

        s = lr max(0, F + BETA <g, z - x>) / (sqrt(pi / 2) |g|_1)
        z <- z - s m / (sqrt(v) + 1e-8),   m and v Adam's corrected moments of g
        x <- (1 - c) x + c z,   c = w / (the sum of all w),  w = (the largest s so far)^2

    By default there is no weight decay, no warm-up, and BETA is constant.
    """

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.steps, self.largest, self.weights = 0, 1e-8, 0.0

    @torch.no_grad()
    def step(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        """Take one step, given the loss whose gradient the parameters have."""
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        absolute, inner = 0.0, 0.0
        for p in parameters:
            state = self.state[p]
            if not state:
                state |= {name: p.detach().clone() for name in "xyz"}
                state |= {name: torch.zeros_like(p) for name in "mv"}
            absolute += float(p.grad.abs().sum())
            inner += float((p.grad * (state["z"] - state["x"])).sum())
        polyak = max(0.0, float(loss) + BETA * inner) / (math.sqrt(math.pi / 2) * absolute)
        size = self.param_groups[0]["lr"] * polyak
        self.steps += 1
        self.largest = max(self.largest, size)
        self.weights += self.largest**2
        c = self.largest**2 / self.weights
        first, second = (1 - beta**self.steps for beta in BETAS)
        for p in parameters:
            x, y, z, m, v = (self.state[p][name] for name in "xyzmv")
            m.lerp_(p.grad, 1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
            z.addcdiv_(m / first, (v / second).sqrt_().add_(1e-8), value=-size)
            x.lerp_(z, c)
            torch.lerp(z, x, BETA, out=y)
            p.copy_(y)

    def eval(self) -> None:
        """Set the parameters to the average x."""
        self._set("x")

    def train(self) -> None:
        """Set the parameters to y, where gradients are taken."""
        self._set("y")

    @torch.no_grad()
    def _set(self, name: str) -> None:
        for p, state in self.state.items():
            p.copy_(state[name])
