"""Rivals without a package, written from their papers: Adam++, NadamW and ScheduleFree+."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamPlusPlus(Optimizer):
    """Adam++ (Tao, Yuan, Zhou, Cao and Gu 2024, arXiv:2412.19444), Algorithm 2, second case.

    Over all d weights together:

        eta_t = max(eta_{t-1}, |x_t - x_0| / sqrt(d))               eta_0 = 1e-6 (1 + |x_0|)
        m_t   = b1 m_{t-1} + (1 - b1) g_t
        v_t   = b2 v_{t-1} + (1 - b2) g_t^2
        s_t   = sqrt((t + 1) max(v_0, ..., v_t))
        x_{t+1} = x_t - lr eta_t m_t / (1e-8 + s_t)

    b1 is constant (the paper's lambda is 1). The paper asks for a small eta_0 only; this one is
    DoG's. m and v are divided by 1 - b^(t+1), as Adam does, which the algorithm as printed does
    not: without it v is a thousandth of g^2 in the first step, and on autoencoder-mnist eta grew
    from 1e-6 to 13 in fifty steps and stayed there.
    """

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.t, self.eta = 0, 0.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        b1, b2 = 0.9, 0.999
        xs = [x for group in self.param_groups for x in group["params"]]
        if self.t == 0:
            for x in xs:
                zeros = {name: torch.zeros_like(x) for name in ("m", "v", "largest")}
                self.state[x] = zeros | {"origin": x.detach().clone()}
            self.eta = 1e-6 * (1 + math.sqrt(sum(float(x.square().sum()) for x in xs)))
        square = sum(float((x - self.state[x]["origin"]).square().sum()) for x in xs)
        self.eta = max(self.eta, math.sqrt(square / sum(x.numel() for x in xs)))
        self.t += 1
        for group, x in with_gradient(self):
            m, v, largest = (self.state[x][name] for name in ("m", "v", "largest"))
            m.lerp_(x.grad, 1 - b1)
            v.mul_(b2).addcmul_(x.grad, x.grad, value=1 - b2)
            torch.maximum(largest, v / (1 - b2**self.t), out=largest)
            s = largest.mul(self.t).sqrt_().add_(1e-8)
            x.addcdiv_(m, s, value=-group["lr"] * self.eta / (1 - b1**self.t))


class NadamW(Optimizer):
    """AdamW with Nesterov's momentum, in the form of Choi and others (2019), table 1.

        x <- x - lr weight_decay x
        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        x <- x - lr (b1 m + (1 - b1) g) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + 1e-8)

    torch.optim.NAdam has another one, where b1 grows over thousands of steps. The constants are
    those of AlgoPerf's self-tuning baseline, calibrated on all of its workloads together.
    """

    LR = 0.0017486387539278373
    BETAS = (1 - 0.06733926164, 0.9955159689799007)
    WEIGHT_DECAY = 0.08121616522670176
    WARMUP = 0.02  # of the run; then a cosine

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        b1, b2 = self.BETAS
        for group, x in with_gradient(self):
            lr, state = group["lr"], self.state[x]
            if not state:
                state |= {"t": 0, "m": torch.zeros_like(x), "v": torch.zeros_like(x)}
            state["t"] += 1
            t, m, v = state["t"], state["m"], state["v"]
            x.mul_(1 - lr * self.WEIGHT_DECAY)
            m.lerp_(x.grad, 1 - b1)
            v.mul_(b2).addcmul_(x.grad, x.grad, value=1 - b2)
            root = (v / (1 - b2**t)).sqrt_().add_(1e-8)
            x.addcdiv_(m.lerp(x.grad, 1 - b1), root, value=-lr / (1 - b1**t))


class ScheduleFreePlus(Optimizer):
    """ScheduleFree+ (Defazio 2026, arXiv:2605.19095), at the defaults of its reference code.

    Schedule-Free AdamW with Polyak's step size, which needs the loss; five buffers. With F and g
    the loss and its gradient at y, over all parameters:

        s = lr max(0, F + BETA <g, z - x>) / (sqrt(pi / 2) |g|_1)
        z <- z - s m / (sqrt(v) + 1e-8),   m and v Adam's corrected moments of g
        x <- (1 - c) x + c z,   c = w / (the sum of all w),  w = (the largest s so far)^2
        y = BETA x + (1 - BETA) z

    By default there is no weight decay, no warm-up, and BETA is constant.
    """

    BETAS = (0.9, 0.95)  # of Adam's moments
    BETA = 0.9

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.t, self.largest, self.weights = 0, 1e-8, 0.0

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        """Take one step, given the loss whose gradient the parameters have."""
        parameters = [p for _, p in with_gradient(self)]
        absolute, inner = 0.0, 0.0
        for p in parameters:
            state = self.state[p]
            if not state:
                state |= {name: p.detach().clone() for name in "xyz"}
                state |= {name: torch.zeros_like(p) for name in "mv"}
            absolute += float(p.grad.abs().sum())
            inner += float((p.grad * (state["z"] - state["x"])).sum())
        polyak = max(0.0, float(loss) + self.BETA * inner) / (math.sqrt(math.pi / 2) * absolute)
        size = self.param_groups[0]["lr"] * polyak
        self.t += 1
        self.largest = max(self.largest, size)
        self.weights += self.largest**2
        c, (b1, b2) = self.largest**2 / self.weights, self.BETAS
        for p in parameters:
            x, y, z, m, v = (self.state[p][name] for name in "xyzmv")
            m.lerp_(p.grad, 1 - b1)
            v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            root = (v / (1 - b2**self.t)).sqrt_().add_(1e-8)
            z.addcdiv_(m, root, value=-size / (1 - b1**self.t))
            x.lerp_(z, c)
            torch.lerp(z, x, self.BETA, out=y)
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


def with_gradient(optimizer: Optimizer) -> list[tuple[dict[str, Any], Any]]:
    """Return the parameters that have a gradient, each with its group."""
    return [(g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
