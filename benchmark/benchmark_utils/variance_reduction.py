"""MARS with its exact correction, and SVRG: written from their papers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmark_utils.training import Training


class Mars:
    """MARS-AdamW, exact version (Yuan et al. 2024, Algorithm 2): two gradients a step.

        c_t = g_t + gamma b1 / (1 - b1) (g_t - grad f(x_{t-1}; xi_t)),  clipped to norm 1
        m_t = b1 m + (1 - b1) c_t,  v_t = b2 v + (1 - b2) c_t^2
        x <- x - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay x)

    Defaults of the authors' code: gamma 0.025, betas (0.95, 0.99), eps 1e-8, no decay. The
    norm is each tensor's own, as there; all tensors are treated alike.
    """

    price = 2

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.lr, self.gamma, self.betas, self.eps = lr, 0.025, (0.95, 0.99), 1e-8
        self.params = list(model.parameters())
        self.previous = [p.detach().clone() for p in self.params]
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.t = 0

    def step(self, training: Training) -> None:
        batch = training.draw()
        if self.t > 0:
            old = self._gradient_at_previous(training, batch)
        training.gradient(batch)
        b1, b2 = self.betas
        self.t += 1
        with torch.no_grad():
            for i, p in enumerate(self.params):
                g = p.grad if p.grad is not None else torch.zeros_like(p)
                c = g if self.t == 1 else g + self.gamma * b1 / (1 - b1) * (g - old[i])
                c = c / max(1.0, float(c.norm()))
                self.m[i].mul_(b1).add_(c, alpha=1 - b1)
                self.v[i].mul_(b2).addcmul_(c, c, value=1 - b2)
                self.previous[i].copy_(p)
                root = (self.v[i] / (1 - b2**self.t)).sqrt_().add_(self.eps)
                p.addcdiv_(self.m[i], root, value=-self.lr / (1 - b1**self.t))

    def _gradient_at_previous(self, training: Training, batch: object) -> list[Tensor]:
        """Of the new sample, at the point before; running statistics stay as they were."""
        buffers = [b.clone() for b in training.model.buffers()]
        with torch.no_grad():
            here = [p.detach().clone() for p in self.params]
            for p, x in zip(self.params, self.previous):
                p.copy_(x)
        training.gradient(batch)
        old = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.params]
        with torch.no_grad():
            for p, x in zip(self.params, here):
                p.copy_(x)
            for b, saved in zip(training.model.buffers(), buffers):
                b.copy_(saved)
        return old

    def result(self, training: Training) -> nn.Module:
        return training.model

    def resume(self, training: Training) -> None:
        """Nothing to put back."""

    @property
    def state_mb(self) -> float:
        return sum(3 * p.numel() * p.element_size() for p in self.params) / 2**20


class Svrg:
    """SVRG (Johnson & Zhang 2013): a full gradient at an anchor every pass over the data.

    The anchor's gradient is charged as the mini-batches that the training set has. Where the
    budget no longer allows a new anchor, the old one is kept.
    """

    price = 2

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.lr, self.params = lr, list(model.parameters())
        self.anchor = copy.deepcopy(model)
        self.full: list[Tensor] = []
        self.left = 0  # steps until the next anchor

    def step(self, training: Training) -> None:
        workload = training.workload
        affordable = training.evaluations + workload.batches + 2 <= workload.budget
        if self.left == 0 and (affordable or not self.full):
            self._take_anchor(training)
        batch = training.draw()
        training.gradient_of(self.anchor, batch)
        training.gradient(batch)
        with torch.no_grad():
            for p, q, full in zip(self.params, self.anchor.parameters(), self.full):
                p.sub_(p.grad - q.grad + full, alpha=self.lr)
        self.left = max(0, self.left - 1)

    def _take_anchor(self, training: Training) -> None:
        self.anchor.load_state_dict(training.model.state_dict())
        self.anchor.zero_grad()
        training.workload.full_loss(self.anchor).backward()
        self.full = [q.grad.clone() for q in self.anchor.parameters()]
        training.evaluations += training.workload.batches
        training.samples += training.workload.batches
        self.left = training.workload.batches

    def result(self, training: Training) -> nn.Module:
        return training.model

    def resume(self, training: Training) -> None:
        """Nothing to put back."""

    @property
    def state_mb(self) -> float:
        return sum(2 * p.numel() * p.element_size() for p in self.params) / 2**20
