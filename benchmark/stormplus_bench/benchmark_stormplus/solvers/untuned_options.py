import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from stormplus import Untuned
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import AtAverage, Stepper
from stormplus_bench.train.training import Training
from stormplus_bench.train.workload import Workload


class Scheduled(AtAverage):
    """A factor on the steps, by the share of the run that is over."""

    def __init__(self, training: Training, factor: Callable[[float], float]) -> None:
        super().__init__(Untuned(training.parameters))
        budget = training.workload.budget
        self.schedule = LambdaLR(self.optimizer, lambda step: factor(step / budget))

    def step(self, training: Training) -> None:
        super().step(training)
        self.schedule.step()


class NotRecalibrated(AtAverage):
    """The average with the running statistics of the iterates."""

    calibration = 0


OPTIONS: dict[str, Callable[[Training], Stepper]] = {
    "bfloat16 state": lambda t: AtAverage(Untuned(t.parameters, state_dtype=torch.bfloat16)),
    "clipped gradients": lambda t: Clipped(Untuned(t.parameters)),
    "cosine to zero": lambda t: Scheduled(t, lambda share: (1 + math.cos(math.pi * share)) / 2),
    "linear to zero": lambda t: Scheduled(t, lambda share: 1 - share),
    "warm-up of a tenth": lambda t: Scheduled(t, lambda share: min(1.0, 10 * share + 1e-3)),
    "not recalibrated": lambda t: NotRecalibrated(Untuned(t.parameters)),
}


class Clipped(AtAverage):
    """The gradient's norm is at most 1, as many recipes have it."""

    def step(self, training: Training) -> None:
        training.gradient(training.draw())
        torch.nn.utils.clip_grad_norm_(training.parameters, 1.0)
        self.optimizer.step()


class Solver(TorchSolver):
    """Untuned with an option of its own, or with what people add to an optimizer."""

    name = "untuned-options"
    label = "Untuned"
    requirements = ["pip::stormplus-bench"]
    parameters = {"lr": [None], "option": ["bfloat16 state"]}
    default_lr = 1.0

    @property
    def method(self) -> str:
        return f"{self.label}: {self.option}"

    def applies(self, workload: Workload) -> tuple[bool, str | None]:
        if self.option == "not recalibrated" and not workload.batch_norm:
            return True, "there is no BatchNorm"
        return False, None

    def stepper(self, training: Training, lr: float) -> Stepper:
        return OPTIONS[self.option](training)
