"""Record the quantities of the theory along a run, from gradients that the run computes anyway.

A step has the gradients g~_t = grad f(x_t; xi_{t+1}) and g_{t+1}, and from the step before d_t
and g_t. g_t and g~_t are two independent samples at x_t. They give, without another evaluation:

| row             | what it is                                            | estimates           |
|-----------------|-------------------------------------------------------|---------------------|
| `innovation_sq` | |d_t - g~_t|^2                                        | |eps_t|^2 + sigma^2 |
| `drift_sq`      | |g_{t+1} - g~_t|^2                                    |                     |
| `smoothness`    | the largest |g_{t+1} - g~_t| / |x_{t+1} - x_t| so far | L on the path       |
| `noise_sq`      | running mean of |g_t - g~_t|^2 / 2                    | sigma^2             |
| `error_sq`      | running mean of |d_t - g~_t|^2, minus `noise_sq`      | |eps_t|^2           |
| `true_error_sq` | |d_t - grad f(x_t)|^2, if `full_grad` is given        |                     |
| `true_noise_sq` | |g_t - grad f(x_t)|^2, if `full_grad` is given        |                     |

Both estimates are unbiased, since xi_{t+1} is independent of d_t and of g_t given x_t. The spread
of `error_sq` is about sigma^2 / sqrt(window), so it can be negative; use `full_grad` to see errors
well below sigma^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from stormplus.install import how_to
from stormplus.theory.problems.base import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from scipy.optimize import OptimizeResult
    from torch import Tensor

    from stormplus.torch import PairedOptimizer

    Vectors: TypeAlias = dict[Tensor, Tensor]  # by parameter


class ScalarWriter(Protocol):
    """The method of a TensorBoard `SummaryWriter` that is used."""

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
    """Records a run of `minimize`, or of a paired torch optimizer, in `rows` (one dict per step).

    With `minimize`: `minimize(observer.watch(grad), x0, sample, steps, callback=observer)`.
    With torch: `with observer.attach(optimizer): ...`, around any training loop.

    Args:
        full_grad: The exact gradient: `full_grad(x)` for `minimize`; for torch
            `full_grad()`, which returns one tensor per parameter (None for a frozen one), of the
            loss: weight decay and the sign of `maximize` are added.
        window: The number of steps that running means look back.
        every: Keep one row in so many steps. Running means use every step.
        writer: A TensorBoard `SummaryWriter`, which gets each row that is kept.
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

    def plot(self) -> Figure:
        """Draw gain and step size, |g| and |d|, and the errors; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(f"observer.plot() needs matplotlib: {how_to('theory')}") from error
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        panels = (
            ("gain and step size", {"gain": "$a_{t+1}$", "step_size": r"$\eta_t$"}),
            ("norms", {"grad_norm": "$|g_t|$", "estimator_norm": "$|d_t|$"}),
            (
                "squared errors",
                {
                    "true_noise_sq": r"$|g_t-\nabla f|^2$",
                    "true_error_sq": r"$|d_t-\nabla f|^2$",
                    "noise_sq": r"$\sigma^2$, estimated",
                    "error_sq": r"$|\epsilon_t|^2$, estimated",
                },
            ),
        )
        for axis, (title, names) in zip(figure.subplots(1, 3), panels):
            for name, label in names.items():
                points = [(row["step"], row[name]) for row in self.rows if row.get(name, 0) > 0]
                if points:
                    axis.loglog(*zip(*points), label=label, linewidth=1)
                    axis.legend(fontsize=8)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("samples t")
            axis.grid(True, alpha=0.3)
        return figure

    def table(self, style: str = "markdown", columns: Sequence[str] | None = None) -> str:
        """Return the rows as "csv", "markdown" or "latex" (a `tabular`).

        Args:
            style: The format. Numbers have 4 digits, in CSV all of them.
            columns: Names of the columns; by default all, in the order of the last row.
        """
        names = list(columns or self.latest)
        digits = "" if style == "csv" else ".4g"
        cells = [[format(row[n], digits) if n in row else "" for n in names] for row in self.rows]
        if style == "csv":
            return "\n".join(",".join(line) for line in [names, *cells]) + "\n"
        if style == "markdown":
            lines = [names, ["---"] * len(names), *cells]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
        if style == "latex":
            head = [name.replace("_", r"\_") for name in names]
            body = "\n".join(" & ".join(line) + r" \\" for line in [head, *cells])
            spec = "r" * len(names)
            return f"\\begin{{tabular}}{{{spec}}}\n{body}\n\\end{{tabular}}\n"
        raise ValueError(f"style must be 'csv', 'markdown' or 'latex', got {style!r}")

    def due(self, step: int) -> bool:
        """Return whether the row of this step is kept."""
        return (step - 1) % self.every == 0

    def record(self, step: int, row: dict[str, float], pair: dict[str, float] | None) -> None:
        """Add a step.

        Args:
            step: t, from 1.
            row: What is known without the pair of gradients.
            pair: `innovation_sq`, `drift_sq`, `move_sq`, `two_sample_sq`; None if there is no pair.
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
        """Return `grad` with a record of its calls."""

        def watched(x: Any, xi: Any) -> Any:
            g = grad(x, xi)
            self._calls.append((_flat(x), _flat(g)))
            return g

        return watched

    def __call__(self, result: OptimizeResult) -> None:
        """Record one sample: the callback of `minimize`."""
        calls, self._calls = self._calls, []
        if not calls:
            raise RuntimeError(
                "the observer saw no gradient: call minimize(observer.watch(grad), ..., "
                "callback=observer)"
            )
        if result.nit == 1:  # drop calls that a failed run has left
            calls, self._previous = calls[-1:], None
        x, d, g = _flat(result.x), _flat(result.estimator), calls[0][1]
        pair = None
        if self._previous is not None and len(calls) == 2:
            g_tilde = calls[1][1]  # minimize evaluates g_{t+1} first (Alg. 1, line 5)
            x_old, g_old, d_old = self._previous
            pair = {
                "innovation_sq": _square(d_old - g_tilde),
                "drift_sq": _square(g - g_tilde),
                "move_sq": _square(x - x_old),
                "two_sample_sq": _square(g_old - g_tilde),
            }
        self._previous = (x, g, d)
        row = {"gain": float(result.gain), "step_size": float(result.step_size)}
        row |= {"grad_norm": _square(g) ** 0.5, "estimator_norm": _square(d) ** 0.5}
        if self.full_grad is not None and self.due(result.nit):
            g_bar = _flat(self.full_grad(result.x))
            row |= {"true_error_sq": _square(d - g_bar), "true_noise_sq": _square(g - g_bar)}
        self.record(result.nit, row, pair)

    # With torch.

    def attach(self, optimizer: PairedOptimizer) -> Attachment:
        """Record a `PairedOptimizer` until `close()`, or within `with`.

        Raises:
            TypeError: The optimizer takes one gradient per step.
            RuntimeError: This observer is attached already.
        """
        from stormplus.torch import PairedOptimizer

        if not isinstance(optimizer, PairedOptimizer):
            raise TypeError(
                "the observer records pairs of gradients: attach it to StormPlus, "
                "SimplifiedStormPlus or Storm (Untuned takes one gradient per step), got "
                f"{type(optimizer).__name__}"
            )
        if self._attachment is not None:
            raise RuntimeError("this observer is attached already: close() its attachment first")
        self._attachment = Attachment(self, optimizer)
        return self._attachment


class Attachment(AbstractContextManager["Attachment"]):
    """Connects an observer to a torch optimizer, until `close()` or the end of the context.

    It keeps g_t between steps, and two more copies while the parameters move.
    """

    def __init__(self, observer: Observer, optimizer: PairedOptimizer) -> None:
        self.observer, self.optimizer = observer, optimizer
        self._g: Vectors = {}  # g_t
        self._before: tuple[Vectors, Vectors, dict[str, float]] | None = None  # while moving
        self._half: tuple[Vectors, dict[str, float]] | None = None  # g~_t, and the row so far
        self._handle = optimizer.register_pass_hook(self._on_pass)

    def close(self) -> None:
        """Stop recording. A second call does nothing."""
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
                self._before = None  # nothing has moved; a pending pair keeps its first half
            elif when == "restarted":
                self._half = None  # the second half will not come

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
        """Return the gradients as the optimizer sees them, with L2 decay and sign.

        From `.grad`, or those given, one per parameter. Parameters without a gradient and frozen
        ones are left out.
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
    """|left - right|^2 over the parameters that both have, in float64."""
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
