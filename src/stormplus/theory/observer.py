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
The spread of `error_sq` is of the order sigma^2 / sqrt(window): an error much smaller
than that drowns in it, and the value can be negative. Use `full_grad` then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from stormplus.theory.problems.base import Array

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult
    from torch import Tensor

    from stormplus.torch import PairedOptimizer

    Vectors: TypeAlias = dict[Tensor, Tensor]  # by parameter


class ScalarWriter(Protocol):
    """What a TensorBoard `SummaryWriter` has."""

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: dict[str, float], global_step: int
    ) -> Any:
        """Write several numbers under one tag."""


class _RunningMean:
    """An exponential mean over about `window` values, unbiased from the first one on."""

    def __init__(self, window: float) -> None:
        self.keep, self.weight, self.total = 1 - 1 / window, 0.0, 0.0

    def add(self, value: float) -> float:
        self.weight = self.keep * self.weight + (1 - self.keep)
        self.total = self.keep * self.total + (1 - self.keep) * value
        return self.total / self.weight


class Observer:
    """Records the theory's quantities of a run of `minimize`, or of a paired torch optimizer.

    With `minimize`: `minimize(observer.watch(grad), x0, sample, steps, callback=observer)`.
    With torch: `with observer.attach(optimizer): ...`, whatever the loop looks like.

    Args:
        full_grad: The exact gradient: `full_grad(x)` for `minimize`; for torch
            `full_grad()`, which returns one tensor a parameter (None for a frozen one), of the
            loss: weight decay and the sign of `maximize` are added. Its cost is the caller's.
        window: How many steps the running means look back.
        every: Keep one row in so many steps. Running means see every step all the same.
        writer: A TensorBoard `SummaryWriter`; gets each row that is kept.
        tag: The writer's main tag.
    """

    def __init__(
        self,
        full_grad: Callable[..., Any] | None = None,
        *,
        window: float = 100.0,
        every: int = 1,
        writer: ScalarWriter | None = None,
        tag: str = "stormplus",
    ) -> None:
        if window < 1 or every < 1:
            raise ValueError(f"window and every must be at least 1, got {window} and {every}")
        self.full_grad, self.every, self.writer, self.tag = full_grad, every, writer, tag
        self.rows: list[dict[str, float]] = []
        self._innovation, self._noise = _RunningMean(window), _RunningMean(window)
        self._smoothness = 0.0
        self._calls: list[tuple[Array, Array]] = []
        self._previous: tuple[Array, Array, Array] | None = None
        self._attachment: Attachment | None = None

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
        if result.nit == 1:  # what a run before this one has left is none of its business
            calls, self._previous = calls[-1:], None
        x, d = _flat(result.x), _flat(result.estimator)
        g = next((g for at, g in calls if np.array_equal(at, x)), calls[0][1])
        pair = None
        if self._previous is not None and len(calls) == 2:
            x_old, g_old, d_old = self._previous
            found = (g for at, g in reversed(calls) if np.array_equal(at, x_old))
            g_tilde = next(found, calls[-1][1])  # without one `minimize` would take it for a stop
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

    def attach(self, optimizer: PairedOptimizer) -> Attachment:
        """Watch `StormPlus`, `SimplifiedStormPlus` or `Storm` until `close()`, or within `with`.

        Raises:
            TypeError: The optimizer takes no pairs of gradients, so there is nothing to record.
            RuntimeError: This observer is attached already.
        """
        from stormplus.torch import PairedOptimizer

        if not isinstance(optimizer, PairedOptimizer):
            raise TypeError(
                "the observer records pairs of gradients: attach it to StormPlus, "
                "SimplifiedStormPlus or Storm (Untuned takes one gradient a step), got "
                f"{type(optimizer).__name__}"
            )
        if self._attachment is not None:
            raise RuntimeError("this observer is attached already: close() its attachment first")
        self._attachment = Attachment(self, optimizer)
        return self._attachment


class Attachment(AbstractContextManager["Attachment"]):
    """An observer at work on a torch optimizer; leaving the context, or `close()`, ends it.

    It holds one more buffer than the optimizer (g_t), and two more while the parameters move.
    """

    def __init__(self, observer: Observer, optimizer: PairedOptimizer) -> None:
        self.observer, self.optimizer = observer, optimizer
        self._g: Vectors = {}  # g_t
        self._before: tuple[Vectors, Vectors, dict[str, float]] | None = None  # while moving
        self._half: tuple[Vectors, dict[str, float]] | None = None  # g~_t and what it told
        self._handle = optimizer.register_pass_hook(self._on_pass)

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._handle.remove()
        self._g, self._before, self._half = {}, None, None
        if self.observer._attachment is self:
            self.observer._attachment = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _on_pass(self, optimizer: PairedOptimizer, when: str) -> None:
        import torch

        with torch.no_grad():
            if when == "before_move":
                self._before_move()
            elif when == "after_move":
                self._after_move()
            elif when == "before_estimate" and not optimizer.pending:
                self._half = None  # the first sample, or a restart: no pair
            elif when == "after_estimate":
                self._after_estimate()
            elif when == "failed":
                self._before = None  # nothing has moved; a pair that is pending keeps its half
            elif when == "restarted":
                self._half = None  # its partner will not come

    def _before_move(self) -> None:
        g_tilde, d = self._gradients(), self._estimators()
        pair = {"innovation_sq": _apart(d, g_tilde), "two_sample_sq": _apart(self._g, g_tilde)}
        self._before = {p: p.detach().clone() for p in d}, g_tilde, pair

    def _after_move(self) -> None:
        assert self._before is not None
        (x, g_tilde, pair), self._before = self._before, None
        pair["move_sq"] = _apart({p: p.detach() for p in x}, x)
        self._half = (g_tilde, pair) if self._g else None  # attached halfway: no g_t yet
        self._g = {}

    def _after_estimate(self) -> None:
        half, self._half = self._half, None
        g = self._g = self._gradients()
        seen = self.optimizer.diagnostics()
        names = ("gain", "step_size", "grad_norm", "estimator_norm")
        row = {name: float(seen[name]) for name in names}
        step = int(seen["step"])
        if self.observer.full_grad is not None and self.observer.due(step):
            import torch

            with torch.enable_grad():
                g_bar = self._gradients(list(self.observer.full_grad()))
            row["true_error_sq"] = _apart(self._estimators(), g_bar)
            row["true_noise_sq"] = _apart(g, g_bar)
        pair = None if half is None else half[1] | {"drift_sq": _apart(g, half[0])}
        self.observer.record(step, row, pair)

    def _gradients(self, given: list[Tensor | None] | None = None) -> Vectors:
        """Gradients as the optimizer sees them: L2 decay and the sign are in.

        Those of `.grad`, or those given, one a parameter. A parameter without one, or
        frozen, is left out, and so takes no part in a comparison.
        """
        found: Vectors = {}
        params = [(group, p) for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for _, p in params] if given is None else given
        for (group, p), g in zip(params, gradients, strict=True):
            if p.requires_grad and g is not None:
                sign = -1.0 if group["maximize"] else 1.0
                decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
                found[p] = sign * g.detach() + decay * p.detach()
        return found

    def _estimators(self) -> Vectors:
        opt = self.optimizer
        params = [p for group in opt.param_groups for p in group["params"]]
        return {p: opt.state[p]["estimator"] for p in params if opt.has_estimator(p)}


def _apart(left: Vectors, right: Vectors) -> float:
    """|left - right|^2 over the parameters that both have, in float64; waits once."""
    import torch

    both = [p for p in left if p in right]
    norms = [torch.linalg.vector_norm(left[p] - right[p], dtype=torch.float64) for p in both]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def _flat(x: Any) -> Array:
    if isinstance(x, (list, tuple)):
        return np.concatenate([np.asarray(block, np.float64).ravel() for block in x])
    return np.array(x, np.float64).ravel()


def _square(v: Array) -> float:
    return float(v @ v)
