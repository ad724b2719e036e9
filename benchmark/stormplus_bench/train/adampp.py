"""Adam++ (Tao, Yuan, Zhou, Cao and Gu, 2024, arXiv:2412.19444), written from its paper."""

import math
from collections.abc import Callable
from typing import Any

import torch


class AdamPlusPlus(torch.optim.Optimizer):
    """Algorithm 2 of the paper, its second case, over all d weights together.

        eta_t = max(eta_{t-1}, |x_t - x_0| / sqrt(d))               eta_0 = 1e-6 (1 + |x_0|)
        m_t   = b1 m_{t-1} + (1 - b1) g_t
        v_t   = b2 v_{t-1} + (1 - b2) g_t^2
        s_t   = sqrt((t + 1) max(v_0, ..., v_t))
        x_{t+1} = x_t - lr eta_t m_t / (delta + s_t)

    b1 is constant (the paper's lambda is 1). The paper asks for a small eta_0 only; this one is
    DoG's. m and v are divided by 1 - b^(t+1), as Adam does, which the algorithm as printed does
    not: without it v is a thousandth of g^2 in the first step, and on autoencoder-mnist eta grew
    from 1e-6 to 13 in fifty steps and stayed there.
    """

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        # t and eta are in the groups, so that a checkpoint has them.
        super().__init__(params, {"lr": lr, "t": 0, "eta": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        b1, b2, delta = 0.9, 0.999, 1e-8
        xs = [x for group in self.param_groups for x in group["params"]]
        t, eta = self.param_groups[0]["t"], self.param_groups[0]["eta"]
        if t == 0:
            for x in xs:
                zeros = {name: torch.zeros_like(x) for name in ("m", "v", "largest")}
                self.state[x] = zeros | {"origin": x.detach().clone()}
            eta = 1e-6 * (1 + math.sqrt(sum(float(x.square().sum()) for x in xs)))
        square = sum(float((x - self.state[x]["origin"]).square().sum()) for x in xs)
        eta = max(eta, math.sqrt(square / sum(x.numel() for x in xs)))
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                m, v, largest = (self.state[x][name] for name in ("m", "v", "largest"))
                m.lerp_(x.grad, 1 - b1)
                v.mul_(b2).addcmul_(x.grad, x.grad, value=1 - b2)
                torch.maximum(largest, v / (1 - b2 ** (t + 1)), out=largest)
                s = largest.mul(t + 1).sqrt_().add_(delta)
                x.addcdiv_(m, s, value=-group["lr"] * eta / (1 - b1 ** (t + 1)))
            group["t"], group["eta"] = t + 1, eta
        return loss
