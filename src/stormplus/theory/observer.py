"""Watching a run: the quantities of the theory, from gradients the run computes anyway.

Both gradients of a step are there: g~_t = grad f(x_t; xi_{t+1}) and g_{t+1}. So are, of
the step before, d_t and g_t, the latter at the same point x_t as g~_t but with another,
independent sample. From these, without one more evaluation:

| row             | what it is                                            | estimates           |
|-----------------|-------------------------------------------------------|---------------------|
| `innovation_sq` | |d_t - g~_t|^2                                        | |eps_t|^2 + sigma^2 |
| `drift_sq`      | |g_{t+1} - g~_t|^2                                    |                     |
| `smoothness`    | the largest |g_{t+1} - g~_t| / |x_{t+1} - x_t| so far | L on the path       |
| `noise_sq`      | running mean of |g_t - g~_t|^2 / 2                    | sigma^2             |
| `error_sq`      | running mean of |d_t - g~_t|^2, less `noise_sq`       | |eps_t|^2           |
| `true_error_sq` | |d_t - grad f(x_t)|^2, if `full_grad` is given        |                     |
| `true_noise_sq` | |g_t - grad f(x_t)|^2, likewise                       |                     |

Both estimates are unbiased, since xi_{t+1} is independent of d_t and of g_t given x_t.
The spread of `error_sq` is of the order sigma^2 / sqrt(memory): an error much smaller
than that drowns in it, and the value can be negative. Use `full_grad` then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stormplus.theory.problems.base import Array

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult


class ScalarWriter(Protocol):
    """What a TensorBoard `SummaryWriter` has."""

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: dict[str, float], global_step: int
    ) -> Any:
        """Write several numbers under one tag."""


class _RunningMean:
    """An exponential mean over about `memory` values, unbiased from the first one on."""

    def __init__(self, memory: float) -> None:
        self.keep, self.weight, self.total = 1 - 1 / memory, 0.0, 0.0

    def add(self, value: float) -> float:
        self.weight = self.keep * self.weight + (1 - self.keep)
        self.total = self.keep * self.total + (1 - self.keep) * value
        return self.total / self.weight


class Observer:
    """Records the theory's quantities of a run of `minimize` or of a torch optimizer.

    With `minimize`: `minimize(observer.watch(grad), x0, sample, steps, callback=observer)`.
    With torch: `with observer.attach(optimizer): ...`, whatever the loop looks like.

    Args:
        full_grad: The exact gradient: `full_grad(x)` for `minimize`; for torch
            `full_grad()`, which returns one tensor a parameter (None for a frozen one), of the
            loss: weight decay and the sign of `maximize` are added. Its cost is the caller's.
        memory: How many steps the running means look back.
        every: Keep one row in so many steps. Running means see every step all the same.
        writer: A TensorBoard `SummaryWriter`; gets each row that is kept.
        tag: The writer's main tag.
    """

    def __init__(
        self,
        full_grad: Callable[..., Any] | None = None,
        *,
        memory: float = 100.0,
        every: int = 1,
        writer: ScalarWriter | None = None,
        tag: str = "stormplus",
    ) -> None:
        if memory < 1 or every < 1:
            raise ValueError(f"memory and every must be at least 1, got {memory} and {every}")
        self.full_grad, self.every, self.writer, self.tag = full_grad, every, writer, tag
        self.rows: list[dict[str, float]] = []
        self._innovation, self._noise = _RunningMean(memory), _RunningMean(memory)
        self._smoothness = 0.0
        self._calls: list[tuple[Array, Array]] = []
        self._previous: tuple[Array, Array, Array] | None = None

    @property
    def latest(self) -> dict[str, float]:
        """The last row."""
        return self.rows[-1]

    def due(self, step: int) -> bool:
        """Whether the row of this step is kept."""
        return (step - 1) % self.every == 0

    def record(self, step: int, row: dict[str, float], pair: dict[str, float] | None) -> None:
        """Add a step: its own row, and what its two gradients tell (None on the first).

        Args:
            step: t, from 1.
            row: What is known without the pair.
            pair: `innovation_sq`, `drift_sq`, `move_sq`, `two_sample_sq`.
        """
        if pair is not None:
            if pair["move_sq"] > 0:
                ratio = (pair["drift_sq"] / pair["move_sq"]) ** 0.5
                self._smoothness = max(self._smoothness, ratio)
            noise = self._noise.add(pair["two_sample_sq"] / 2)
            error = self._innovation.add(pair["innovation_sq"]) - noise
            row = row | {
                "innovation_sq": pair["innovation_sq"],
                "drift_sq": pair["drift_sq"],
                "smoothness": self._smoothness,
                "noise_sq": noise,
                "error_sq": error,
            }
        if self.due(step):
            self.rows.append({"step": float(step)} | row)
            if self.writer is not None:
                self.writer.add_scalars(self.tag, row, step)

    # With `minimize`.

    def watch(self, grad: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """`grad`, which also tells the observer."""

        def watched(x: Any, xi: Any) -> Any:
            g = grad(x, xi)
            self._calls.append((_flat(x), _flat(g)))
            return g

        return watched

    def __call__(self, result: OptimizeResult) -> None:
        """The callback of `minimize`: one sample is done."""
        calls, self._calls = self._calls, []
        if not calls:
            raise RuntimeError(
                "the observer saw no gradient: call minimize(observer.watch(grad), ..., "
                "callback=observer)"
            )
        x, d = _flat(result.x), _flat(result.estimator)
        g = next((g for at, g in calls if np.array_equal(at, x)), calls[0][1])
        pair = None
        if self._previous is not None and len(calls) == 2:
            x_old, g_old, d_old = self._previous
            g_tilde = next(g for at, g in reversed(calls) if np.array_equal(at, x_old))
            pair = {
                "innovation_sq": _square(d_old - g_tilde),
                "drift_sq": _square(g - g_tilde),
                "move_sq": _square(x - x_old),
                "two_sample_sq": _square(g_old - g_tilde),
            }
        self._previous = (x, g, d)
        row = {name: float(np.mean(result[name])) for name in ("gain", "step_size")}
        row |= {"grad_norm": _square(g) ** 0.5, "estimator_norm": _square(d) ** 0.5}
        if self.full_grad is not None and self.due(result.nit):
            g_bar = _flat(self.full_grad(result.x))
            row |= {"true_error_sq": _square(d - g_bar), "true_noise_sq": _square(g - g_bar)}
        self.record(result.nit, row, pair)

    # With torch.

    def attach(self, optimizer: Any) -> Attachment:
        """Watch a torch optimizer of this package until `close()`, or within `with`."""
        from stormplus.theory.torch_observer import TorchAttachment

        return TorchAttachment(self, optimizer)


class Attachment(AbstractContextManager["Attachment"]):
    """An observer at work; leaving the context, or `close()`, ends it."""

    def close(self) -> None:
        """Stop watching."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _flat(x: Any) -> Array:
    if isinstance(x, (list, tuple)):
        return np.concatenate([np.asarray(block, np.float64).ravel() for block in x])
    return np.array(x, np.float64).ravel()


def _square(v: Array) -> float:
    return float(v @ v)
