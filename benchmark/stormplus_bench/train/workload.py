"""Workloads: a model, a stream of samples, a loss, and measurements.

The initial model and the samples depend on the seed alone, so every method starts at the same
point and sees the same samples.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset, default_collate

from stormplus.theory.problems import FiniteSum

# The target of the performance profiles is read off at 0.7.
FRACTIONS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Workload(ABC):
    """One training task.

    Attributes:
        name: As tables and figures show it.
        budget: Gradient evaluations of one mini-batch that a run may spend.
        batch_size: Examples in a mini-batch.
        batches: Mini-batches in the training set: the price of a full gradient.
        batch_norm: Whether the model has running statistics.
        fractions: Shares of the budget at which the run is measured.
        measured: Examples of each split that are measured, at most.
    """

    name: str
    budget: int
    batch_size: int
    batches: int
    measured: int
    batch_norm = False
    fractions: tuple[float, ...] = FRACTIONS
    device = "cpu"

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Return the model at its initial point."""

    @abstractmethod
    def samples(self, seed: int) -> Iterator[Any]:
        """Yield samples without end; both gradients of a paired step use the same one."""

    @abstractmethod
    def loss(self, model: nn.Module, sample: Any) -> Tensor:
        """Return the loss to differentiate."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return losses and accuracies; those that do not apply are left out."""

    def full_grad_norm(self, model: nn.Module) -> float:
        """Return |grad f| over the measured training examples, nan if that is too expensive."""
        return math.nan

    @abstractmethod
    def full_loss(self, model: nn.Module) -> Tensor:
        """Return the loss over the whole training set."""

    def set_budget(self, budget: int | None) -> None:
        """Change the budget, and the name with it; None keeps both."""
        if budget and budget != self.budget:
            self.budget = budget
            self.name = f"{self.name} ({budget} evaluations)"

    @property
    def checkpoints(self) -> list[int]:
        """Gradient evaluations at which to measure, from 0 to the budget."""
        return sorted({round(fraction * self.budget) for fraction in self.fractions})


class Smooth(Workload):
    """A problem of `stormplus.theory.problems` in float64; `held_out` has the validation data."""

    budget = 1500

    def __init__(
        self,
        name: str,
        problem: FiniteSum,
        held_out: FiniteSum | None = None,
        accuracy: Callable[[FiniteSum, Any], float] | None = None,
    ) -> None:
        self.name, self.problem, self.held_out, self.accuracy = name, problem, held_out, accuracy
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
        x, found = _iterate(model), {}
        for split, problem in (("train", self.problem), ("valid", self.held_out)):
            if problem is not None:
                found[f"{split}_loss"] = problem.full_value(x)
            if problem is not None and self.accuracy is not None:
                found[f"{split}_accuracy"] = self.accuracy(problem, x)
        return found

    def full_loss(self, model: nn.Module) -> Tensor:
        return self.loss(model, np.arange(self.problem.n_samples))

    def full_grad_norm(self, model: nn.Module) -> float:
        return float(np.linalg.norm(self.problem.full_grad(_iterate(model))))


def _iterate(model: nn.Module) -> Any:
    """Return the single parameter of a smooth problem as an array."""
    (x,) = model.parameters()
    return x.detach().numpy()


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a model whose initial weights depend on the seed alone; keep the global RNG state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Network(Workload):
    """A model, a loss, data and a budget; the arguments are the names in a workload file.

    Args:
        name: As tables and figures show it.
        model: Makes the model, after the seed is set; or a model with its initial weights, of
            which every run trains a copy.
        loss: Of the model and a batch.
        data: (inputs, targets) or more tensors or arrays of one length, a torch Dataset, or a
            function that returns one of these.
        budget: Gradient evaluations of a run.
        valid: Validation data.
        batch_size: Examples in a mini-batch.
        accuracy: Of the model and a batch.
        measures: Returns values by name ("loss", "accuracy") for the model and a batch; by
            default those of the two functions.
        full_grad: Whether to measure the norm of the full gradient, too.
    """

    measured = 2000
    augment: Callable[[Tensor, Generator], Tensor] | None = None  # random, of a batch's inputs

    def __init__(
        self,
        name: str,
        model: Callable[[], nn.Module] | nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        data: Any,
        budget: int,
        *,
        valid: Any = None,
        batch_size: int = 32,
        accuracy: Callable[[nn.Module, Any], Any] | None = None,
        measures: Callable[[nn.Module, Any], dict[str, Any]] | None = None,
        full_grad: bool = False,
    ) -> None:
        for what, number in (("budget", budget), ("batch_size", batch_size)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}: {what} should be a positive int, got {number!r}")
        self.name, self.budget, self.batch_size = name, budget, batch_size
        self.make = (lambda: model) if isinstance(model, nn.Module) else model
        self.criterion, self.accuracy = loss, accuracy
        self.measures = measures or self._measures
        self.train = _examples(data, f"{name}: data")
        self.valid = None if valid is None else _examples(valid, f"{name}: valid")
        self.full_grad = full_grad
        self.batches = math.ceil(len(self.train) / batch_size)
        self.measured = min(self.measured, len(self.train))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def model(self, seed: int) -> nn.Module:
        model = copy.deepcopy(seeded(self.make, seed))  # `make` may return one object every time
        norms = nn.modules.batchnorm._BatchNorm
        self.batch_norm = any(isinstance(module, norms) for module in model.modules())
        return model

    def samples(self, seed: int) -> Iterator[Any]:
        generator = Generator().manual_seed(1000 + seed)
        length = len(self.train)
        while True:  # epochs without replacement, without the last short batch
            order = torch.randperm(length, generator=generator)
            for chosen in order.split(self.batch_size):
                if len(chosen) == min(self.batch_size, length):
                    batch = _batch(self.train, chosen)
                    if self.augment is not None:
                        batch = (self.augment(batch[0], generator), *batch[1:])
                    yield batch

    def loss(self, model: nn.Module, sample: Any) -> Tensor:
        return self.criterion(model, self._to_device(sample))

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        found: dict[str, float] = defaultdict(float)
        for split, examples in (("train", self.train), ("valid", self.valid)):
            for batch, weight in self._parts(examples):
                for what, value in self.measures(model, batch).items():
                    found[f"{split}_{what}"] += weight * float(value)
        model.train()
        return found

    def _measures(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        found = {"loss": self.criterion(model, batch)}
        return found if self.accuracy is None else found | {"accuracy": self.accuracy(model, batch)}

    def full_loss(self, model: nn.Module) -> Tensor:
        return self.loss(model, _batch(self.train, torch.arange(len(self.train))))

    def full_grad_norm(self, model: nn.Module) -> float:
        if not self.full_grad:
            return math.nan
        model.eval()
        model.zero_grad()
        for batch, weight in self._parts(self.train):
            (weight * self.criterion(model, batch)).backward()
        square = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
        model.zero_grad()
        model.train()
        return math.sqrt(square)

    def _parts(self, examples: Any) -> Iterator[tuple[Any, float]]:
        """Yield the measured examples in batches of 500, with their shares of the whole."""
        if examples is None:
            return
        count = min(self.measured, len(examples))
        for chosen in torch.arange(count).split(500):
            yield self._to_device(_batch(examples, chosen)), len(chosen) / count

    def _to_device(self, batch: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(self.device), batch)


def _examples(data: Any, where: str) -> Any:
    if isinstance(data, DataLoader):
        raise TypeError(
            f"{where} should be the data set, not its DataLoader: the benchmark draws the batches, "
            "the same ones for every method"
        )
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        data = data()
    arrays = (Tensor, np.ndarray)
    if isinstance(data, Sequence) and data and all(isinstance(part, arrays) for part in data):
        lengths = [len(part) for part in data]
        if len(set(lengths)) > 1:
            raise ValueError(f"{where}: lengths differ, {lengths}")
        data = TensorDataset(*map(torch.as_tensor, data))
    is_list = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not is_list or isinstance(data, Mapping | str):
        raise TypeError(
            f"{where} should be (inputs, targets), or a torch Dataset with a length, got {data!r}"
        )
    if len(data) == 0:
        raise ValueError(f"{where} is empty")
    return data


def _batch(examples: Any, chosen: Tensor) -> Any:
    if isinstance(examples, TensorDataset):
        return examples[chosen]
    return default_collate([examples[i] for i in chosen.tolist()])
