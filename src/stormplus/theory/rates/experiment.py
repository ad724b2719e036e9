"""The rate experiment: E|grad f(x_bar_T)| against T, for five methods and several sigma.

No method here uses T, so one run to the largest T gives every smaller one. The expectation
over the random index of x_bar_T is the exact mean over x_1..x_T; only the samples are
random. All runs of a method go side by side: arrays have the axes (noise level, seed,
coordinate), and the rules of `stormplus.rules` are called on arrays over (noise level, seed).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray

from stormplus.rules import Rule, Sums, make_rule
from stormplus.theory.problems.base import Array
from stormplus.theory.problems.bounded import BoundedNonConvex
from stormplus.theory.rivals import Gradients, adagrad_norm, sgd, square_norm

METHODS = ("storm+", "simplified-storm+", "storm", "sgd", "adagrad-norm")
# As in `stormplus.theory.rivals`: a generator of the iterates after x_1.
Method: TypeAlias = Callable[[Gradients, Array], Iterator[Array]]
Progress: TypeAlias = Callable[[int], None]  # told how many steps are done


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


def corrected_momentum(gradients: Gradients, x: Array, rule: Rule) -> Iterator[Array]:
    """STORM+, simplified STORM+ or STORM: Algorithm 1 with one of the library's rules."""
    d = g = gradients.grad(x, gradients.draw(1))  # Alg. 1, line 1
    sums, t = Sums(), 1
    while True:
        sums, a, eta = rule(sums, square_norm(g), square_norm(d), t)  # Alg. 1, line 3
        x_old, x = x, x - eta[..., None] * d  # Alg. 1, line 4
        xi, t = gradients.draw(1), t + 1
        g_tilde, g = gradients.grad(x_old, xi), gradients.grad(x, xi)  # Alg. 1, line 5
        d = g + (1 - np.asarray(a)[..., None]) * (d - g_tilde)  # Alg. 1, line 6
        yield x


def samples(
    seeds: tuple[int, ...], dim: int, steps: int, at_once: int = 1024
) -> Iterator[tuple[Array, Array]]:
    """Signs (xi, xi') of every step, one stream a seed, whatever the other seeds are."""
    streams = [np.random.default_rng([seed, 1]) for seed in seeds]
    for start in range(0, steps, at_once):
        size = (min(at_once, steps - start), 2, dim)
        bits = [stream.integers(2, size=size, dtype=np.int8) for stream in streams]
        signs = 2.0 * np.stack(bits, axis=2) - 1  # step, which, seed, coordinate
        for step in signs:
            yield step[0], step[1]


class ManyRuns:
    """The gradients of all runs at once, from samples that are drawn seed by seed.

    All gradients at one x come from the same two slopes, so those at the last x are kept.
    """

    def __init__(
        self, problem: BoundedNonConvex, samples: Iterator[tuple[Array, Array]], x: Array
    ) -> None:
        self.problem, self.samples = problem, samples
        self._at, self._slopes = x, problem.slopes(x)

    def draw(self, size: int) -> tuple[Array, Array]:
        return next(self.samples)

    def grad(self, x: Array, xi: Any) -> Array:
        return self.problem.grad_from_slopes(self._slopes_at(x), xi)

    def full_grad(self, x: Array) -> Array:
        return self.problem.height * self._slopes_at(x)[0]

    def _slopes_at(self, x: Array) -> tuple[Array, Array]:
        if x is not self._at:
            self._at, self._slopes = x, self.problem.slopes(x)
        return self._slopes


def measure(
    method: Method,
    problem: BoundedNonConvex,
    seeds: tuple[int, ...],
    checkpoints: NDArray[np.int64],
    progress: Progress = lambda _: None,
) -> tuple[Array, Array]:
    """Mean and mean square of |grad f| over x_1..x_T, at each checkpoint T, of every run."""
    steps = int(checkpoints[-1])
    x = np.stack([problem.start(np.random.default_rng([seed, 0])) for seed in seeds])
    axes = np.broadcast_shapes(problem.sigma.shape, (len(seeds),))
    x = np.broadcast_to(x, (*axes, problem.dim))
    runs = ManyRuns(problem, samples(seeds, problem.dim, steps), x)
    norm = square = np.zeros(axes)
    found: dict[int, tuple[Array, Array]] = {}
    wanted = set(checkpoints.tolist())
    for t, iterate in enumerate(chain([x], method(runs, x)), start=1):
        g_bar_sq = square_norm(runs.full_grad(iterate))
        norm = norm + np.sqrt(g_bar_sq)
        square = square + g_bar_sq
        if t in wanted:
            found[t] = norm / t, square / t
        if t == steps:
            break
        if t % 4096 == 0:
            progress(t)
    means, squares = zip(*found.values())
    return np.array(means), np.array(squares)


def run_method(name: str, plan: Plan, progress: Progress = lambda _: None) -> Result:
    """Tune what has to be tuned, then run one method on all seeds and noise levels."""
    start = time.perf_counter()
    problem = BoundedNonConvex(plan.dim, np.array(plan.sigmas)[:, None])
    tuning: dict[str, Any] = {}
    method: Method

    def alive(_: int) -> None:
        progress(0)  # no step of the run itself, but a sign of life

    if name == "sgd":
        method, tuning = tune_sgd(plan, problem, alive)
    elif name == "storm":
        method, tuning = tune_storm(plan, alive)
    elif name == "adagrad-norm":
        method = adagrad_norm
    else:
        method = partial(corrected_momentum, rule=make_rule(name))
    mean, square = measure(method, problem, plan.seeds, plan.checkpoints, progress)
    progress(plan.steps)
    return Result(name, mean, square, time.perf_counter() - start, tuning)


def tune_sgd(
    plan: Plan, problem: BoundedNonConvex, alive: Progress
) -> tuple[Method, dict[str, Any]]:
    """The best lr of the grid at each sigma."""
    smoothness, _ = _constants(problem)

    def tuned(lr: Array) -> Method:
        return partial(sgd, smoothness=smoothness, step_size=lr)

    grid = np.array(plan.sgd_grid)
    last = np.array([plan.tuning_steps])
    mean, _ = measure(tuned(grid[:, None, None]), problem, plan.tuning_seeds, last, alive)
    scores = mean[0].mean(-1)  # grid, sigma
    best = grid[scores.argmin(0)]
    tuning = {"lr": best.tolist(), "grid": list(plan.sgd_grid), "scores": scores.tolist()}
    return tuned(best[:, None]), tuning


def tune_storm(plan: Plan, alive: Progress) -> tuple[Method, dict[str, Any]]:
    """STORM's theory leaves b free: the best b of the grid at the headline sigma.

    L and G are those of the headline sigma, the largest, and so valid for all.
    """
    problem = BoundedNonConvex(plan.dim, plan.sigmas[-1])
    constants = [storm_constants(*_constants(problem), b) for b in plan.storm_grid]
    candidates = [partial(corrected_momentum, rule=make_rule("storm", **c)) for c in constants]
    last = np.array([plan.tuning_steps])
    scores = [
        float(measure(method, problem, plan.tuning_seeds, last, alive)[0].mean())
        for method in candidates
    ]
    best = int(np.argmin(scores))
    tuning = {"b": plan.storm_grid[best], "grid": list(plan.storm_grid), "scores": scores}
    return candidates[best], tuning | {"constants": constants[best]}


def storm_constants(smoothness: float, grad_bound: float, b: float) -> dict[str, float]:
    """STORM's constants, from Theorem 1 of Cutkosky & Orabona (2019), for a free b > 0.

    Their k, w and c are k = b G^(2/3) / L, c = 28 L^2 + G^2 / (7 L k^3) and
    w = max((4 L k)^3, 2 G^2, (c k / (4 L))^3); the rule here wants theta = k and c / L^2.
    """
    k = b * grad_bound ** (2 / 3) / smoothness
    c = 28 * smoothness**2 + grad_bound**2 / (7 * smoothness * k**3)
    w = max((4 * smoothness * k) ** 3, 2 * grad_bound**2, (c * k / (4 * smoothness)) ** 3)
    return {"theta": k, "w": w, "c": c / smoothness**2, "smoothness": smoothness}


def _constants(problem: BoundedNonConvex) -> tuple[float, float]:
    """L and G, which this problem always knows."""
    smoothness, grad_bound = problem.constants.smoothness, problem.constants.grad_bound
    assert smoothness is not None
    assert grad_bound is not None
    return smoothness, grad_bound
