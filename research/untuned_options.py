"""Untuned with an option, or with what recipes add: `python research/untuned_options.py SEED...`.

Rows go to research/results/untuned_options.jsonl; research/untuned_study.py makes their table.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from common import parser
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from stormplus import Untuned
from stormplus_bench import rows
from stormplus_bench.train import catalogue
from stormplus_bench.train.steppers import AtAverage, Stepper
from stormplus_bench.train.training import Training, row_of

ROWS = Path(__file__).parent / "results" / "untuned_options.jsonl"
WORKLOADS = (
    *("autoencoder-mnist", "cnn-mnist", "bncnn-cifar10"),
    *("resnet-cifar10", "gpt-shakespeare"),
)


class Clipped(AtAverage):
    """The gradient's norm is at most 1."""

    def step(self, training: Training) -> None:
        training.gradient(training.draw())
        clip_grad_norm_(training.parameters, 1.0)
        self.optimizer.step()


class Scheduled(AtAverage):
    """Every step is multiplied by a function of the part of the run that is over."""

    def __init__(self, training: Training, factor: Callable[[float], float]) -> None:
        super().__init__(Untuned(training.parameters))
        budget = training.workload.budget
        self.schedule = LambdaLR(self.optimizer, lambda step: factor(step / budget))

    def step(self, training: Training) -> None:
        super().step(training)
        self.schedule.step()


class NotRecalibrated(AtAverage):
    """The average, with BatchNorm's statistics of the iterates."""

    calibration = 0


OPTIONS: dict[str, Callable[[Training], Stepper]] = {
    "bfloat16 state": lambda t: AtAverage(Untuned(t.parameters, state_dtype=torch.bfloat16)),
    "clipped gradients": lambda t: Clipped(Untuned(t.parameters)),
    "cosine to zero": lambda t: Scheduled(t, lambda part: (1 + math.cos(math.pi * part)) / 2),
    "linear to zero": lambda t: Scheduled(t, lambda part: 1 - part),
    "warm-up of a tenth": lambda t: Scheduled(t, lambda part: min(1.0, 10 * part + 1e-3)),
    "not recalibrated": lambda t: NotRecalibrated(Untuned(t.parameters)),
}


def main(seeds: list[int]) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        for name in WORKLOADS:
            for option, make in OPTIONS.items():
                workload = catalogue.EVERY[name]()
                workload.model(seed)  # finds out whether there is BatchNorm
                if option == "not recalibrated" and not workload.batch_norm:
                    continue
                method = f"Untuned: {option}"
                if rows.Key(name, method, 1.0, seed) in rows.keys(ROWS):
                    continue
                workload.fractions = (0, 1)
                training = Training(workload, make, seed).finish()
                row = row_of(training, {"method": method, "lr": 1.0, "default": True})
                rows.append(ROWS, row)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("seeds", nargs="+", type=int)
    main(options.parse_args().seeds)
