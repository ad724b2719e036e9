"""Steppers: how each kind of method takes a step, and which model it returns to its user."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from dog import PolynomialDecayAverager  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from stormplus import same_sample
from stormplus_bench.memory import size_mb, state_mb
from stormplus_bench.train.training import Diverged, Training


class Stepper(ABC):
    """A method in a run; `gradients_per_step` is the largest number that it takes."""

    gradients_per_step = 1

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
    """The usual loop: a gradient, then a step of the optimizer, and of others if there are any.

    `copies` are the tensors that the method keeps apart from the optimizers' state.
    """

    copies: Sequence[Tensor] = ()

    def __init__(self, optimizer: Any, *others: Any) -> None:
        self.optimizer, self.others = optimizer, others

    def step(self, training: Training) -> None:
        training.gradient(training.draw())
        for optimizer in (self.optimizer, *self.others):
            optimizer.step()

    @property
    def state_mb(self) -> float:
        optimizers = (self.optimizer, *self.others)
        return sum(map(state_mb, optimizers)) + size_mb(self.copies)


class TwoGradients(OneGradient):
    """STORM+: the closure runs twice per sample; BatchNorm's statistics are updated once."""

    gradients_per_step = 2

    def step(self, training: Training) -> None:
        sample = training.draw()

        def closure() -> Tensor:
            return training.gradient(sample)

        if training.workload.batch_norm:
            closure = same_sample(self.optimizer, training.model)(closure)
        self.optimizer.step(closure)


class Averaged(OneGradient):
    """Measured at an average of the iterates: DoG with its authors' averager."""

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        super().__init__(optimizer)
        self.averager = PolynomialDecayAverager(model)
        self.copies = list(self.averager.averaged_model.parameters())

    def step(self, training: Training) -> None:
        try:
            super().step(training)
        except AssertionError as error:  # DoG found a NaN
            raise Diverged(str(error)) from error
        self.averager.step()

    def result(self, training: Training) -> nn.Module:
        average: nn.Module = self.averager.averaged_model
        return training.model if training.evaluations == 0 else average


class AtAverage(OneGradient):
    """Untuned, Schedule-Free: the result is the average, not where gradients are taken.

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


class AtAverageWithLoss(AtAverage):
    """ScheduleFree+: its step needs the loss."""

    def step(self, training: Training) -> None:
        self.optimizer.step(training.gradient(training.draw()))


class Scheduled(OneGradient):
    """Linear warm-up, then a decay to zero.

    Args:
        optimizer: A torch optimizer.
        budget: Number of steps.
        warmup: Share of the steps in which the rate rises.
        linear: Whether the decay is a line instead of a cosine.
    """

    def __init__(self, optimizer: Any, budget: int, warmup: float, *, linear: bool = False) -> None:
        super().__init__(optimizer)
        rising = round(warmup * budget)

        def factor(step: int) -> float:
            if step < rising:
                return (step + 1) / rising
            left = 1 - (step - rising) / max(budget - rising, 1)
            return left if linear else (1 - math.cos(math.pi * left)) / 2

        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(self, training: Training) -> None:
        super().step(training)
        self.schedule.step()


class Mars(OneGradient):
    """MARS-AdamW (Yuan et al. 2024, Algorithm 2): AdamW on a corrected gradient.

        c_t = g_t + gamma b1 / (1 - b1) (g_t - old_t),  clipped to norm 1 per tensor

    Defaults of the authors' code: gamma 0.025, betas (0.95, 0.99), eps 1e-8, no weight decay.
    This is the exact version, with `old_t` the gradient of sample t at x_{t-1}: two gradients per
    step, on all tensors.
    """

    gradients_per_step = 2

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(AdamW(model.parameters(), lr, (0.95, 0.99), weight_decay=0.0))
        self.previous = copy.deepcopy(model)
        self.copies = list(self.previous.parameters())

    def step(self, training: Training) -> None:
        sample = training.draw()
        if training.evaluations > 0:
            training.gradient(sample, self.previous)
        training.gradient(sample)
        with torch.no_grad():
            for p, q in zip(training.model.parameters(), self.copies):
                if p.grad is not None:
                    p.grad = self.corrected(p.grad, p.grad if q.grad is None else q.grad)
                q.copy_(p)
        self.optimizer.step()

    @staticmethod
    def corrected(g: Tensor, old: Tensor) -> Tensor:
        """Return c_t."""
        c = g + 0.025 * 0.95 / (1 - 0.95) * (g - old)
        return c / max(1.0, float(c.norm()))


class MarsApproximate(OneGradient):
    """The version of MARS that its authors use by default: one gradient per step.

    `old_t` is the gradient g_{t-1} of the previous sample, 0 at the start. Only matrices are
    corrected; the others have AdamW with betas (0.9, 0.95) and weight decay 0.1, as there.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.matrices = [p for p in parameters if p.ndim == 2]
        rest = [p for p in parameters if p.ndim != 2]
        groups = [
            {"params": self.matrices, "betas": (0.95, 0.99), "weight_decay": 0.0},
            {"params": rest, "betas": (0.9, 0.95), "weight_decay": 0.1},
        ]
        super().__init__(AdamW(groups, lr))
        self.copies = [torch.zeros_like(p) for p in self.matrices]

    def step(self, training: Training) -> None:
        training.gradient(training.draw())
        for p, old in zip(self.matrices, self.copies):
            g = gradient_of(p)
            p.grad = Mars.corrected(g, old)
            old.copy_(g)
        self.optimizer.step()


def gradient_of(p: Tensor) -> Tensor:
    """Return the gradient, zeros if there is none."""
    return torch.zeros_like(p) if p.grad is None else p.grad


class Svrg(OneGradient):
    """SVRG (Johnson & Zhang 2013): a full gradient at an anchor once per epoch.

    The anchor's gradient costs as many evaluations as the training set has mini-batches. The last
    anchor is kept when the budget does not allow another one.
    """

    gradients_per_step = 2

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(SGD(model.parameters(), lr))
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
        anchor = self.anchor.parameters()
        for p, q, full in zip(training.model.parameters(), anchor, self.full):
            p.grad = gradient_of(p) - gradient_of(q) + full
        self.optimizer.step()
        self.left = max(0, self.left - 1)

    def _take_anchor(self, training: Training) -> None:
        self.anchor.load_state_dict(training.model.state_dict())
        self.anchor.zero_grad()
        training.workload.full_loss(self.anchor).backward()
        self.full = [gradient_of(q).clone() for q in self.anchor.parameters()]
        self.copies = [*self.anchor.parameters(), *self.full]
        training.evaluations += training.workload.batches
        training.samples += training.workload.batches
        self.left = training.workload.batches
