"""NadamW: AdamW with Nesterov's momentum, at the one setting that AlgoPerf's studies fix."""

from collections.abc import Callable
from typing import Any

import torch

# Of AlgoPerf's self-tuning baseline, which has no choice of workload in it.
LEARNING_RATE = 0.0017486387539278373
BETAS = (1 - 0.06733926164, 0.9955159689799007)
WEIGHT_DECAY = 0.08121616522670176
WARMUP = 0.02  # of the run; then a cosine


class NadamW(torch.optim.Optimizer):
    """In the form of Choi and others (2019), table 1.

        x <- x - lr weight_decay x
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        x <- x - lr (b1 m + (1 - b1) g) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + 1e-8)

    torch.optim.NAdam has another one, where b1 grows over thousands of steps.
    """

    def __init__(self, params: Any, lr: float = LEARNING_RATE) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], BETAS
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(x), "v": torch.zeros_like(x)}
                state["t"] += 1
                t, m, v = state["t"], state["m"], state["v"]
                x.mul_(1 - lr * WEIGHT_DECAY)
                m.lerp_(x.grad, 1 - b1)
                v.mul_(b2).addcmul_(x.grad, x.grad, value=1 - b2)
                root = (v / (1 - b2**t)).sqrt_().add_(1e-8)
                x.addcdiv_(m.lerp(x.grad, 1 - b1), root, value=-lr / (1 - b1**t))
        return loss
