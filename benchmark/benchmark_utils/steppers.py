"""How each kind of method takes a step, and which point it would hand to its user."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmark_utils.training import Diverged, Training
from stormplus import Untuned, same_sample


class OneGradient:
    """The usual loop: a gradient, then `optimizer.step()`."""

    price = 1

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, training: Training) -> None:
        training.gradient(training.draw())
        self.optimizer.step()

    def result(self, training: Training) -> nn.Module:
        return training.model

    def resume(self, training: Training) -> None:
        """Go on after `result`."""

    @property
    def state_mb(self) -> float:
        """What the optimizer keeps between steps."""
        held = [self.optimizer.state, self.optimizer.param_groups]
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return sum(t.nbytes for k, t in _tensors(held).items() if k not in mine) / 2**20


def _tensors(held: Any) -> dict[int, Tensor]:
    """Every tensor in nested dicts and lists, once."""
    if isinstance(held, Tensor):
        return {id(held): held}
    parts = held.values() if isinstance(held, dict) else held
    if not isinstance(held, dict | list | tuple):
        return {}
    return {k: t for part in parts for k, t in _tensors(part).items()}


class TwoGradients(OneGradient):
    """Ours: the closure is called twice on one sample, BatchNorm's statistics move once."""

    price = 2

    def step(self, training: Training) -> None:
        batch = training.draw()

        def closure() -> Tensor:
            return training.gradient(batch)

        if training.workload.batch_norm:
            closure = same_sample(self.optimizer, training.model)(closure)
        self.optimizer.step(closure)


class Averaged(OneGradient):
    """DoG: its authors call averaging of the iterates crucial, and ship the averager."""

    def __init__(self, optimizer: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optimizer)
        self.averager = averager

    def step(self, training: Training) -> None:
        try:
            super().step(training)
        except AssertionError as error:  # how it says that a norm is not a number
            raise Diverged(str(error)) from error
        self.averager.step()

    def result(self, training: Training) -> nn.Module:
        return training.model if training.evaluations == 0 else self.averager.averaged_model

    @property
    def state_mb(self) -> float:
        average = sum(p.nbytes for p in self.averager.averaged_model.parameters())
        return super().state_mb + average / 2**20


class AtAverage(OneGradient):
    """STORM+ in units: its user validates and saves the average, between eval() and train()."""

    optimizer: Untuned

    def result(self, training: Training) -> nn.Module:
        self.optimizer.eval()
        return training.model

    def resume(self, training: Training) -> None:
        self.optimizer.train()


class ScheduleFree(OneGradient):
    """Schedule-Free: evaluated at another point than the gradients are taken at.

    Where there is BatchNorm its statistics are taken anew there, as its documentation asks.
    """

    calibration = 50  # batches, as its documentation has it

    def step(self, training: Training) -> None:
        self.optimizer.train()
        super().step(training)

    def result(self, training: Training) -> nn.Module:
        if training.evaluations == 0:
            return training.model
        self.optimizer.eval()
        model = copy.deepcopy(training.model)
        if training.workload.batch_norm:
            batches = training.workload.samples(training.seed + 10_000)
            with torch.no_grad():
                model.train()
                for _, batch in zip(range(self.calibration), batches):
                    training.workload.loss(model, batch)
        return model

    def resume(self, training: Training) -> None:
        self.optimizer.train()
