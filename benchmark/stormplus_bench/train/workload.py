"""What is trained: a model, a stream of samples, a loss, and what is measured of them.

A workload knows nothing of optimizers. Its model and its stream of samples depend on the
seed alone, so every method starts at the same point and sees the same samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stormplus.theory.problems import FiniteSum

# 0.7 is where the target of the performance profiles is read off.
FRACTIONS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Workload(ABC):
    """One training task.

    Attributes:
        name: As in every table and figure.
        budget: Gradient evaluations of one mini-batch that a run may spend; if it `counts`
            samples, the mini-batches that a run sees, whatever a method pays for one.
        counts: "evaluations" or "samples".
        batch_size: Examples in a mini-batch.
        batches: Mini-batches in the whole training set: what a full gradient costs.
        batch_norm: Whether the model has running statistics.
        fractions: Of the budget, where the run is measured.
        measured: At most so many examples of each split are measured.
        version: Of the file that it is from, "" if it is the benchmark's own.
        resumes: Whether a run keeps its state at every measurement, to go on from there.
        watches: Whether runs of STORM+ measure the error of their estimator too.
    """

    name: str
    budget: int
    batch_size: int
    batches: int
    batch_norm = False
    fractions: tuple[float, ...] = FRACTIONS
    measured: int
    version = ""
    device = "cpu"
    counts = "evaluations"
    resumes = watches = False

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model at its starting point."""

    @abstractmethod
    def samples(self, seed: int) -> Iterator[Any]:
        """Samples, without end: what both gradients of a step are taken on."""

    @abstractmethod
    def loss(self, model: nn.Module, sample: Any) -> Tensor:
        """The loss that is differentiated."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Losses and accuracies; what does not apply is left out."""

    def full_grad_norm(self, model: nn.Module) -> float:
        """|grad f| over the measured training examples; nan where that costs too much."""
        return math.nan

    @abstractmethod
    def full_loss(self, model: nn.Module) -> Tensor:
        """The loss over the whole training set, for methods that need its gradient."""

    @property
    def checkpoints(self) -> list[int]:
        """Where to measure, in what the budget counts, from 0 to the budget."""
        return sorted({round(fraction * self.budget) for fraction in self.fractions})


class Smooth(Workload):
    """A problem of `stormplus.theory.problems`, in float64; `held_out` has unseen data."""

    def __init__(
        self,
        name: str,
        problem: FiniteSum,
        held_out: FiniteSum | None = None,
        accuracy: Callable[[FiniteSum, Any], float] | None = None,
        *,
        budget: int,
    ) -> None:
        self.name, self.budget = name, budget
        self.problem, self.held_out, self.accuracy = problem, held_out, accuracy
        self.batch_size = problem.batch_size
        self.batches = math.ceil(problem.n_samples / problem.batch_size)
        self.measured = problem.n_samples

    def model(self, seed: int) -> nn.Module:
        return self.problem.module(self.problem.start(seed))

    def samples(self, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng([seed, 1])
        while True:
            yield self.problem.sample(rng)

    def loss(self, model: nn.Module, sample: Any) -> Tensor:
        loss: Tensor = model(sample)
        return loss

    def measure(self, model: nn.Module) -> dict[str, float]:
        x = _iterate(model)
        found = {"train_loss": self.problem.full_value(x)}
        if self.held_out is not None:
            found["valid_loss"] = self.held_out.full_value(x)
        if self.accuracy is not None:
            found["train_accuracy"] = self.accuracy(self.problem, x)
            if self.held_out is not None:
                found["valid_accuracy"] = self.accuracy(self.held_out, x)
        return found

    def full_loss(self, model: nn.Module) -> Tensor:
        return self.loss(model, np.arange(self.problem.n_samples))

    def full_grad_norm(self, model: nn.Module) -> float:
        return float(np.linalg.norm(self.problem.full_grad(_iterate(model))))


def _iterate(model: nn.Module) -> Any:
    """The one parameter of a smooth problem, as an array."""
    (x,) = model.parameters()
    return x.detach().numpy()


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model whose first weights depend on the seed alone; the stream outside stands still."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def has_batch_norm(model: nn.Module) -> bool:
    """Whether it has running statistics that belong to a point."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


class Network(Workload):
    """A network on tensors: `inputs` and `targets`, of which some are measured.

    Args:
        prepare: Turns stored examples into what the model takes (bytes to floats).
        criterion: Loss of predictions and targets.
        classes: Whether targets are classes, so that an accuracy makes sense.
        full_grad: Whether a gradient over the measured examples is affordable.
        augment: Changes stored training examples at random, with a generator.
    """

    measured = 2000

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module],
        train: tuple[Tensor, Tensor],
        valid: tuple[Tensor, Tensor],
        *,
        budget: int,
        batch_size: int,
        prepare: Callable[[Tensor], Tensor] = lambda x: x,
        criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        classes: bool = True,
        full_grad: bool = False,
        augment: Callable[[Tensor, torch.Generator], Tensor] = lambda x, _: x,
    ) -> None:
        self.name, self.budget, self.batch_size = name, budget, batch_size
        self.make, self.train, self.valid = make, train, valid
        self.prepare, self.criterion, self.augment = prepare, criterion, augment
        self.classes, self.full_grad = classes, full_grad
        self.batches = math.ceil(len(train[0]) / batch_size)
        self.measured = min(self.measured, len(train[0]))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def model(self, seed: int) -> nn.Module:
        model = seeded(self.make, seed)
        self.batch_norm = has_batch_norm(model)
        return model

    def samples(self, seed: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1000 + seed)
        inputs, targets = self.train
        while True:  # epochs without replacement, the last short batch left out
            order = torch.randperm(len(inputs), generator=generator)
            for chosen in order.split(self.batch_size):
                if len(chosen) == min(self.batch_size, len(inputs)):
                    changed = self.augment(inputs[chosen], generator)
                    yield self.prepare(changed), targets[chosen]

    def loss(self, model: nn.Module, sample: Any) -> Tensor:
        inputs, targets = (part.to(self.device) for part in sample)
        return self.criterion(model(inputs), targets)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        found = {}
        for split, examples in (("train", self.train), ("valid", self.valid)):
            total, right, count = 0.0, 0.0, 0
            for inputs, targets in self._parts(examples):
                predicted = model(inputs)
                total += float(self.criterion(predicted, targets)) * len(inputs)
                if self.classes:
                    axis = 1 if predicted.ndim > 1 else 0
                    right += float((predicted.argmax(axis) == targets).double().mean()) * len(
                        inputs
                    )
                count += len(inputs)
            found[f"{split}_loss"] = total / count
            if self.classes:
                found[f"{split}_accuracy"] = right / count
        model.train()
        return found

    def full_loss(self, model: nn.Module) -> Tensor:
        return self.loss(model, (self.prepare(self.train[0]), self.train[1]))

    def full_grad_norm(self, model: nn.Module) -> float:
        if not self.full_grad:
            return math.nan
        model.eval()
        model.zero_grad()
        count = min(self.measured, len(self.train[0]))
        for inputs, targets in self._parts(self.train):
            loss = self.criterion(model(inputs), targets) * (len(inputs) / count)
            loss.backward()
        square = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
        model.zero_grad()
        model.train()
        return math.sqrt(square)

    def batch_gradients(self, model: nn.Module, seed: int) -> Iterator[list[Tensor]]:
        """The gradients of an epoch's mini-batches, all at the model as it is.

        BatchNorm is in training mode, as a sample has it; its running statistics are put back.
        Each list is that of `.grad`, until the next one.
        """
        buffers = [b.clone() for b in model.buffers()]
        samples = self.samples(seed)
        for _ in range(len(self.train[0]) // self.batch_size):
            model.zero_grad()
            self.loss(model, next(samples)).backward()
            yield [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with torch.no_grad():
            for b, saved in zip(model.buffers(), buffers):
                b.copy_(saved)

    def _parts(self, examples: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = (part[: self.measured] for part in examples)
        for start in range(0, len(inputs), 500):
            part = self.prepare(inputs[start : start + 500]), targets[start : start + 500]
            yield part[0].to(self.device), part[1].to(self.device)
