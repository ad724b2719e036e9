"""The paper's experiment to its end, on few images: what is run next.

Every method sees as many epochs as the others. It starts from the best rate of the sweep, which
saw the first epochs only, and from there half a decade at a time, until the rate with the lowest
training loss at the end lies between two others; then this one with a second seed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals

# By method: benchopt's name and options, and the first rate. Where there is a sweep it is the best
# one of it; the others are what moves the parameters about as far as STORM+ mean and SGD do.
METHODS: dict[str, tuple[str, dict[str, list[str]], float]] = {
    "SGD momentum": ("sgd-momentum", {}, 0.00316),
    "STORM+ mean": ("storm-plus", {"norm": ["mean"]}, 0.00316),
    "Adam": ("adam", {}, 0.0001),
    "STORM+": ("storm-plus", {"norm": ["raw"]}, 0.316),
    "AdaGrad": ("adagrad", {}, 0.001),
    "STORM mean": ("storm", {"norm": ["mean"]}, 0.1),
    "STORM": ("storm", {"norm": ["raw"]}, 0.0316),
    "simplified STORM+ mean": ("simplified-storm-plus", {"norm": ["mean"]}, 0.01),
    "simplified STORM+": ("simplified-storm-plus", {"norm": ["raw"]}, 0.316),
    "Untuned": ("untuned", {}, 1.0),
}
RATES = 6  # of a method, at most
SEEDS = (0, 1)


@dataclass(frozen=True)
class Course:
    """How many images, and how often they are seen."""

    images: int
    epochs: int

    @property
    def name(self) -> str:
        """As the benchmark's `paper` data set calls itself."""
        return f"resnet34-cifar10 ({self.images} images, {self.epochs} epochs)"


COURSES = {
    "course": Course(1000, 100),  # two cores: a night
    "course-smoke": Course(200, 2),  # does it run at all?
}


def stage(
    course: Course, frame: pd.DataFrame, methods: Collection[str]
) -> tuple[str, dict[str, Any]] | None:
    """What to run next, with a title and as benchopt's configuration; None at the end.

    Raises:
        ValueError: A method is not one of `METHODS`.
    """
    if unknown := sorted(set(methods) - set(METHODS)):
        raise ValueError(f"unknown method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    wanted = [method for method in METHODS if method in methods]  # in the order of the table
    frame = frame[frame["workload"] == course.name]
    runs = set(zip(frame["method"], frame["lr"], frame["seed"]))
    first = {m: [METHODS[m][2]] for m in wanted if (m, METHODS[m][2], SEEDS[0]) not in runs}
    if first:
        return "the first rate of each method", _config(course, first, SEEDS[0])
    best = finals.tuned(frame[frame["seed"] == SEEDS[0]]).set_index("method")["lr"]
    more = {}
    for m in wanted:
        tried = {lr for method, lr, seed in runs if method == m and seed == SEEDS[0]}
        beside = {neighbour(best[m], step) for step in (-1, 1)} - tried
        if beside and len(tried) < RATES:
            more[m] = sorted(beside)
    if more:
        return "the rates beside the best ones", _config(course, more, SEEDS[0])
    for seed in SEEDS[1:]:
        again = {m: [float(best[m])] for m in wanted if (m, best[m], seed) not in runs}
        if again:
            return f"the best rates, seed {seed}", _config(course, again, seed)
    return None


def neighbour(lr: float, step: int) -> float:
    """The next of ..., 0.0001, 0.000316, 0.001, ...: half a decade, three digits."""
    exponent = (round(2 * math.log10(lr)) + step) / 2
    return float(f"{10**exponent:.3g}")


def _config(course: Course, rates: dict[str, list[float]], seed: int) -> dict[str, Any]:
    return {
        "objective": [{"Training loss": {"seed": [seed]}}],
        "dataset": [{"paper": {"images": [course.images], "epochs": [course.epochs]}}],
        "solver": [
            {METHODS[method][0]: {"lr": lrs, **METHODS[method][1]}} for method, lrs in rates.items()
        ],
    }
