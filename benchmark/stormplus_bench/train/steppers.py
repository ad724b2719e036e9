"""Steppers: how each kind of method takes a step, and which model it returns to its user.

MARS (exact version) and SVRG are written from their papers.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from stormplus import same_sample
from stormplus_bench.train.training import Diverged, Training


class Stepper(ABC):
    """A method in a run; `price` is the largest number of gradients per step."""

    price = 1

    @abstractmethod
    def step(self, training: Training) -> None:
        """Draw a sample and take one step."""

    def result(self, training: Training) -> nn.Module:
        """Return the model that the method would return to its user now."""
        return training.model

    def resume(self) -> None:  # noqa: B027 - most methods need nothing
        """Return to training after `result`."""

    @property
    @abstractmethod
    def state_mb(self) -> float:
        """Size of the method's state between steps, in MB."""


class OneGradient(Stepper):
    """The usual loop: a gradient, then `optimizer.step()`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, training: Training) -> None:
        training.gradient(training.draw())
        self.optimizer.step()

    @property
    def state_mb(self) -> float:
        held = [self.optimizer.state, self.optimizer.param_groups]
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return sum(t.nbytes for k, t in _tensors(held).items() if k not in mine) / 2**20


def _tensors(held: Any) -> dict[int, Tensor]:
    """Return the tensors in nested dicts and lists by id."""
    if isinstance(held, Tensor):
        return {id(held): held}
    parts = held.values() if isinstance(held, dict) else held
    if not isinstance(held, dict | list | tuple):
        return {}
    return {k: t for part in parts for k, t in _tensors(part).items()}


def gradient_of(p: Tensor) -> Tensor:
    """Return the gradient, zeros if there is none."""
    return torch.zeros_like(p) if p.grad is None else p.grad


class TwoGradients(OneGradient):
    """STORM+: the closure runs twice per sample; BatchNorm's statistics are updated once."""

    price = 2

    def step(self, training: Training) -> None:
        sample = training.draw()

        def closure() -> Tensor:
            return training.gradient(sample)

        if training.workload.batch_norm:
            closure = same_sample(self.optimizer, training.model)(closure)
        self.optimizer.step(closure)


class Averaged(OneGradient):
    """DoG with its authors' averager, which they call crucial."""

    def __init__(self, optimizer: Any, averager: Any) -> None:
        super().__init__(optimizer)
        self.averager = averager

    def step(self, training: Training) -> None:
        try:
            super().step(training)
        except AssertionError as error:  # DoG found a NaN
            raise Diverged(str(error)) from error
        self.averager.step()

    def result(self, training: Training) -> nn.Module:
        return training.model if training.evaluations == 0 else self.averager.averaged_model

    @property
    def state_mb(self) -> float:
        average: float = sum(p.nbytes for p in self.averager.averaged_model.parameters())
        return super().state_mb + average / 2**20


class AtAverage(OneGradient):
    """Untuned and Schedule-Free: the result is the average, not where gradients are taken.

    BatchNorm's statistics are recomputed there, as both methods ask for.
    """

    calibration = 50  # samples, as in Schedule-Free's documentation

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        optimizer.train()

    def result(self, training: Training) -> nn.Module:
        if training.evaluations == 0:
            return training.model
        self.optimizer.eval()
        model = copy.deepcopy(training.model)
        if training.workload.batch_norm:
            samples = training.workload.samples(training.seed + 10_000)
            with torch.no_grad():
                model.train()
                for _, sample in zip(range(self.calibration), samples):
                    training.workload.loss(model, sample)
        return model

    def resume(self) -> None:
        self.optimizer.train()


class Scheduled(OneGradient):
    """Linear warm-up, then a cosine to zero.

    Args:
        optimizer: A torch optimizer.
        budget: Number of steps.
        warmup: Share of the steps in which the rate rises.
    """

    def __init__(self, optimizer: Any, budget: int, warmup: float) -> None:
        super().__init__(optimizer)
        rising = round(warmup * budget)

        def factor(step: int) -> float:
            if step < rising:
                return (step + 1) / rising
            return (1 + math.cos(math.pi * (step - rising) / max(budget - rising, 1))) / 2

        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(self, training: Training) -> None:
        super().step(training)
        self.schedule.step()


class Mars(Stepper):
    """MARS-AdamW, exact version (Yuan et al. 2024, Algorithm 2): two gradients per step.

        c_t = g_t + gamma b1 / (1 - b1) (g_t - grad f(x_{t-1}; xi_t)),  clipped to norm 1
        m_t = b1 m + (1 - b1) c_t,  v_t = b2 v + (1 - b2) c_t^2
        x <- x - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay x)

    Defaults of the authors' code: gamma 0.025, betas (0.95, 0.99), eps 1e-8, no decay. The norm
    is per tensor, as there.
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
        sample = training.draw()
        old = self._gradient_at_previous(training, sample) if self.t > 0 else []
        training.gradient(sample)
        b1, b2 = self.betas
        self.t += 1
        with torch.no_grad():
            for i, p in enumerate(self.params):
                g = gradient_of(p)
                c = g if self.t == 1 else g + self.gamma * b1 / (1 - b1) * (g - old[i])
                c = c / max(1.0, float(c.norm()))
                self.m[i].mul_(b1).add_(c, alpha=1 - b1)
                self.v[i].mul_(b2).addcmul_(c, c, value=1 - b2)
                self.previous[i].copy_(p)
                root = (self.v[i] / (1 - b2**self.t)).sqrt_().add_(self.eps)
                p.addcdiv_(self.m[i], root, value=-self.lr / (1 - b1**self.t))

    def _gradient_at_previous(self, training: Training, sample: Any) -> list[Tensor]:
        """Return the sample's gradient at the previous iterate; restore running statistics."""
        buffers = [b.clone() for b in training.model.buffers()]
        with torch.no_grad():
            here = [p.detach().clone() for p in self.params]
            for p, x in zip(self.params, self.previous):
                p.copy_(x)
        training.gradient(sample)
        old = [gradient_of(p).clone() for p in self.params]
        with torch.no_grad():
            for p, x in zip(self.params, here):
                p.copy_(x)
            for b, saved in zip(training.model.buffers(), buffers):
                b.copy_(saved)
        return old

    @property
    def state_mb(self) -> float:
        return sum(3 * p.numel() * p.element_size() for p in self.params) / 2**20


class Svrg(Stepper):
    """SVRG (Johnson & Zhang 2013): a full gradient at an anchor once per epoch.

    The anchor's gradient costs as many evaluations as the training set has mini-batches. The last
    anchor is kept when the budget does not allow another one.
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
        sample = training.draw()
        training.gradient(sample, self.anchor)
        training.gradient(sample)
        with torch.no_grad():
            for p, q, full in zip(self.params, self.anchor.parameters(), self.full):
                p.sub_(gradient_of(p) - gradient_of(q) + full, alpha=self.lr)
        self.left = max(0, self.left - 1)

    def _take_anchor(self, training: Training) -> None:
        self.anchor.load_state_dict(training.model.state_dict())
        self.anchor.zero_grad()
        training.workload.full_loss(self.anchor).backward()
        self.full = [gradient_of(q).clone() for q in self.anchor.parameters()]
        training.evaluations += training.workload.batches
        training.samples += training.workload.batches
        self.left = training.workload.batches

    @property
    def state_mb(self) -> float:
        return sum(2 * p.numel() * p.element_size() for p in self.params) / 2**20
