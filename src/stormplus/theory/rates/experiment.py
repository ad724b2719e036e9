"""The rate experiment: E|grad f(x_bar_T)| against T, for five methods and several sigma.

No method here uses T, so one run to the largest T gives every smaller one. The expectation
over the random index of x_bar_T is the exact mean over x_1..x_T; only the samples are
random.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from stormplus.rules import make_rule
from stormplus.theory.problems.base import Array
from stormplus.theory.problems.bounded import BoundedNonConvex
from stormplus.theory.rates.methods import (
    SGD,
    AdaGradNorm,
    CorrectedMomentum,
    Method,
    storm_constants,
)

METHODS = ("storm+", "simplified-storm+", "storm", "sgd", "adagrad-norm")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """What is run; fixed before anything is.

    Attributes:
        steps: The largest T, and the length of the longest run.
        seeds: The first point and the samples of run i come from seed i.
        sigmas: Noise levels; the first is 0, the last is the headline.
        window: The T over which slopes are fitted.
        tuning_steps: Length of the runs that tune SGD and STORM, on seeds of their own.
        sgd_grid: Candidates for SGD's lr, at each sigma.
        storm_grid: Candidates for STORM's free constant b, at the headline sigma.
    """

    steps: int = 1_000_000
    seeds: tuple[int, ...] = tuple(range(20))
    sigmas: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    dim: int = 10
    first: int = 100
    per_decade: int = 5
    window: tuple[int, int] = (10_000, 1_000_000)
    tuning_steps: int = 100_000
    tuning_seeds: tuple[int, ...] = (1000, 1001, 1002, 1003, 1004)
    sgd_grid: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    storm_grid: tuple[float, ...] = (0.03, 0.1, 0.2, 0.5, 1.0, 2.0)

    def __post_init__(self) -> None:
        if self.sigmas[0] != 0 or list(self.sigmas) != sorted(self.sigmas):
            raise ValueError(f"sigmas must start with 0 and grow, got {self.sigmas}")
        if not self.first <= self.window[0] < self.window[1] <= self.steps:
            raise ValueError(
                f"window must lie between {self.first} and {self.steps}, got {self.window}"
            )

    @property
    def checkpoints(self) -> NDArray[np.int64]:
        """The T that are recorded: evenly spaced on a log scale."""
        decades = np.log10(self.steps / self.first)
        count = round(decades * self.per_decade) + 1
        return np.unique(np.geomspace(self.first, self.steps, count).round().astype(np.int64))

    @classmethod
    def quick(cls) -> Plan:
        """Seconds instead of minutes, for a look and for tests."""
        return cls(
            steps=3_000,
            seeds=tuple(range(6)),
            sigmas=(0.0, 0.1, 1.0),
            window=(300, 3_000),
            tuning_steps=500,
            tuning_seeds=(1000, 1001),
        )


def versions() -> dict[str, str]:
    """What a number depends on besides the code."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "machine": platform.machine(),
    }


@dataclass
class Result:
    """One method's rows: arrays over (checkpoint, sigma, seed).

    Attributes:
        mean: (1/T) sum_t |grad f(x_t)|, which is E|grad f(x_bar_T)| of the run.
        square: (1/T) sum_t |grad f(x_t)|^2.
        tuning: What was tuned, the grid, and what was chosen.
        versions: Of what it was computed with.
    """

    method: str
    mean: Array
    square: Array
    seconds: float
    tuning: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)


def samples(
    seeds: tuple[int, ...], dim: int, steps: int, chunk: int = 1024
) -> Iterator[tuple[Array, Array]]:
    """Signs (xi, xi') of every step, one stream a seed, whatever the other seeds are."""
    streams = [np.random.default_rng([seed, 1]) for seed in seeds]
    for start in range(0, steps, chunk):
        size = (min(chunk, steps - start), 2, dim)
        bits = [stream.integers(2, size=size, dtype=np.int8) for stream in streams]
        signs = 2.0 * np.stack(bits, axis=2) - 1  # step, which, seed, coordinate
        for step in signs:
            yield step[0], step[1]


def measure(
    method: Method,
    problem: BoundedNonConvex,
    seeds: tuple[int, ...],
    checkpoints: NDArray[np.int64],
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Array, Array]:
    """Mean and mean square of |grad f| over x_1..x_T, at each checkpoint T, of every run."""
    steps = int(checkpoints[-1])
    x = np.stack([problem.start(np.random.default_rng([seed, 0])) for seed in seeds])
    lead = np.broadcast_shapes(problem.sigma.shape, (len(seeds),))
    lead = np.broadcast_shapes(lead, np.shape(getattr(method, "lr", 0.0)))
    x = np.broadcast_to(x, (*lead, problem.dim)).copy()
    norm, square = np.zeros(lead), np.zeros(lead)
    found: list[tuple[Array, Array]] = []
    due = iter(checkpoints.tolist())
    target = next(due)
    gradients = method.run(problem, x, samples(seeds, problem.dim, steps))
    for t, g_bar in enumerate(gradients, start=1):
        g_bar_sq = np.einsum("...i,...i->...", g_bar, g_bar)
        norm += np.sqrt(g_bar_sq)
        square += g_bar_sq
        if t == target:
            found.append((norm / t, square / t))
            if t == steps:
                break
            target = next(due)
        if t % 4096 == 0:
            progress(t)
    means, squares = zip(*found)
    return np.array(means), np.array(squares)


def run_method(name: str, plan: Plan, progress: Progress = lambda *_: None) -> Result:
    """Tune what has to be tuned, then run one method on all seeds and noise levels."""
    start = time.perf_counter()
    problem = BoundedNonConvex(plan.dim, np.array(plan.sigmas)[:, None])
    tuning: dict[str, Any] = {}
    method: Method

    def alive(_: int) -> None:
        progress(name, 0, plan.steps)  # no step of the run itself, but a sign of life

    if name == "sgd":
        method, tuning = tune_sgd(plan, problem, alive)
    elif name == "storm":
        method, tuning = tune_storm(plan, alive)
    elif name == "adagrad-norm":
        method = AdaGradNorm()
    else:
        method = CorrectedMomentum(make_rule(name))
    mean, square = measure(
        method, problem, plan.seeds, plan.checkpoints, lambda t: progress(name, t, plan.steps)
    )
    progress(name, plan.steps, plan.steps)
    return Result(name, mean, square, time.perf_counter() - start, tuning)


def tune_sgd(
    plan: Plan, problem: BoundedNonConvex, alive: Callable[[int], None]
) -> tuple[SGD, dict[str, Any]]:
    """The best lr of the grid at each sigma."""
    grid = np.array(plan.sgd_grid)[:, None, None]
    last = np.array([plan.tuning_steps])
    mean, _ = measure(SGD(grid), problem, plan.tuning_seeds, last, alive)
    scores = mean[0].mean(-1)  # grid, sigma
    best = np.array(plan.sgd_grid)[scores.argmin(0)]
    tuning = {"lr": best.tolist(), "grid": list(plan.sgd_grid), "scores": scores.tolist()}
    return SGD(best[:, None]), tuning


def tune_storm(
    plan: Plan, alive: Callable[[int], None]
) -> tuple[CorrectedMomentum, dict[str, Any]]:
    """STORM's theory leaves b free: the best b of the grid at the headline sigma.

    L and G are those of the headline sigma, the largest, and so valid for all.
    """
    problem = BoundedNonConvex(plan.dim, plan.sigmas[-1])
    smoothness, grad_bound = problem.constants.smoothness, problem.constants.grad_bound
    assert smoothness is not None
    assert grad_bound is not None
    last = np.array([plan.tuning_steps])
    candidates = [
        CorrectedMomentum(make_rule("storm", **storm_constants(smoothness, grad_bound, b)))
        for b in plan.storm_grid
    ]
    scores = [
        float(measure(method, problem, plan.tuning_seeds, last, alive)[0].mean())
        for method in candidates
    ]
    best = int(np.argmin(scores))
    constants = storm_constants(smoothness, grad_bound, plan.storm_grid[best])
    tuning = {"b": plan.storm_grid[best], "grid": list(plan.storm_grid), "scores": scores}
    return candidates[best], tuning | {"constants": constants}
