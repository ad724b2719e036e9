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

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from stormplus.install import required

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from scipy.optimize import OptimizeResult
    from torch import Tensor

    from stormplus.torch import PairedOptimizer

Vectors: TypeAlias = dict[Any, Any]  # tensors by parameter, or the array of `minimize` under 0

REPORTED = ("gain", "step_size", "grad_norm", "estimator_norm")
PANELS = {
    "gain and step size": {"gain": "$a_{t+1}$", "step_size": r"$\eta_t$"},
    "norms": {"grad_norm": "$|g_t|$", "estimator_norm": "$|d_t|$"},
    "squared errors": {
        "true_noise_sq": r"$|g_t-\nabla f|^2$",
        "true_error_sq": r"$|d_t-\nabla f|^2$",
        "noise_sq": r"$\sigma^2$, estimated",
        "error_sq": r"$|\epsilon_t|^2$, estimated",
    },
}


class _Point(NamedTuple):
    """What is known at x_t; in torch, x and d are those of the optimizer, and change with it."""

    x: Vectors
    d: Vectors
    g: Vectors


class Observer:
    """Records a run of `minimize`, or of a paired torch optimizer, in `rows` (one dict per step).

    With `minimize`: `minimize(observer.watch(grad), x0, sample, steps, callback=observer)`.
    With torch: `with observer.attach(optimizer): ...`, around any training loop.

    Args:
        full_grad: The exact gradient: `full_grad(x)` for `minimize`; for torch
            `full_grad()`, which returns one tensor per parameter (None for a frozen one), of the
            loss: weight decay and the sign of `maximize` are added.
        window: The running means are over about this many steps.
        every: Keep every n-th row. Running means use every step.
        writer: A TensorBoard `SummaryWriter`; its `add_scalars` gets each row that is kept.
        tag: The writer's main tag.
    """

    def __init__(
        self,
        full_grad: Callable[..., Any] | None = None,
        *,
        window: float = 100.0,
        every: int = 1,
        writer: Any = None,
        tag: str = "stormplus",
    ) -> None:
        if window < 1 or every < 1:
            raise ValueError(f"window and every must be at least 1, got {window} and {every}")
        self.full_grad, self.every, self.writer, self.tag = full_grad, every, writer, tag
        self.rows: list[dict[str, float]] = []
        self._step = 1 / window  # of the exponential means
        self._weight = self._innovation = self._noise = self._smoothness = 0.0
        self._calls: list[Vectors] = []  # gradients of `minimize` since its last callback
        self._attachment: Attachment | None = None
        self._forget()

    @property
    def latest(self) -> dict[str, float]:
        """The last row."""
        return self.rows[-1]

    def plot(self) -> Figure:
        """Draw gain and step size, |g| and |d|, and the errors; needs matplotlib."""
        with required("theory"):
            from matplotlib.figure import Figure
        self._check_rows()
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        for axis, (title, names) in zip(figure.subplots(1, 3), PANELS.items()):
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
        self._check_rows()
        names, known = list(columns or self.latest), {name for row in self.rows for name in row}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"columns must be among {', '.join(sorted(known))}; got {unknown}")
        digits = "" if style == "csv" else ".4g"
        rows = [[format(row[n], digits) if n in row else "" for n in names] for row in self.rows]
        if style == "csv":
            return "".join(",".join(row) + "\n" for row in [names, *rows])
        if style == "markdown":
            lines = [names, ["---"] * len(names), *rows]
            return "".join(f"| {' | '.join(row)} |\n" for row in lines)
        if style == "latex":
            lines = [[name.replace("_", r"\_") for name in names], *rows]
            body = "".join(" & ".join(row) + " \\\\\n" for row in lines)
            return f"\\begin{{tabular}}{{{'r' * len(names)}}}\n{body}\\end{{tabular}}\n"
        raise ValueError(f"style must be 'csv', 'markdown' or 'latex', got {style!r}")

    def _check_rows(self) -> None:
        if not self.rows:
            raise ValueError("the observer has no rows: pass callback=observer, or attach it")

    def _forget(self) -> None:
        """Drop what is known at x_t: the next step makes no pair."""
        self._point: _Point | None = None
        self._pair: tuple[Vectors, Vectors, float, float] | None = None

    def _first_gradient(self, g_tilde: Vectors, copy: Callable[[Any], Any]) -> None:
        if self._point is not None:  # otherwise attached halfway
            x, d, g = self._point
            noise, innovation = _square_distance(g, g_tilde), _square_distance(d, g_tilde)
            self._pair = {key: copy(v) for key, v in x.items()}, g_tilde, noise, innovation

    def _second_gradient(
        self,
        step: int,
        reported: Mapping[str, Any],
        point: _Point,
        exact: Callable[[Callable[..., Any]], Vectors],
    ) -> None:
        """Add a row. `exact` calls `full_grad` at the point."""
        row = {name: float(reported[name]) for name in REPORTED}
        due = (step - 1) % self.every == 0
        if self.full_grad is not None and due:
            g_bar = exact(self.full_grad)
            row["true_error_sq"] = _square_distance(point.d, g_bar)
            row["true_noise_sq"] = _square_distance(point.g, g_bar)
        if self._pair is not None:
            x_old, g_tilde, noise, innovation = self._pair
            drift, move = _square_distance(point.g, g_tilde), _square_distance(point.x, x_old)
            if move > 0:
                self._smoothness = max(self._smoothness, (drift / move) ** 0.5)
            # Exponential means, unbiased from the first value on.
            self._weight += self._step * (1 - self._weight)
            self._noise += self._step * (noise / 2 - self._noise)
            self._innovation += self._step * (innovation - self._innovation)
            row |= {"innovation_sq": innovation, "drift_sq": drift, "smoothness": self._smoothness}
            row["noise_sq"] = self._noise / self._weight
            row["error_sq"] = (self._innovation - self._noise) / self._weight
        self._point, self._pair = point, None
        if due:
            self.rows.append({"step": float(step)} | row)
            if self.writer is not None:
                self.writer.add_scalars(self.tag, row, step)

    # With `minimize`.

    def watch(self, grad: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return `grad` with a record of its calls."""

        def watched(x: Any, xi: Any) -> Any:
            g = grad(x, xi)
            self._calls.append(_flat(g))
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
        if result.nit == 1:
            calls = calls[-1:]  # drop calls that a failed run has left
        elif len(calls) == 2:  # minimize evaluates g_{t+1} first (Alg. 1, line 5)
            self._first_gradient(calls[1], np.copy)
        point = _Point(_flat(result.x), _flat(result.estimator), calls[0])
        self._second_gradient(result.nit, result, point, lambda grad: _flat(grad(result.x)))

    # With torch.

    def attach(self, optimizer: PairedOptimizer) -> Attachment:
        """Record a `PairedOptimizer` until `close()`, or within `with`."""
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

    It keeps g_t between steps, and two more copies from the move to the second evaluation.
    """

    def __init__(self, observer: Observer, optimizer: PairedOptimizer) -> None:
        self.observer, self.optimizer = observer, optimizer
        self._generation = optimizer.generation
        observer._forget()
        self._handle = optimizer.register_pass_hook(self._on_pass)

    def close(self) -> None:
        """Stop recording. A second call does nothing."""
        self._handle.remove()
        if self.observer._attachment is self:
            self.observer._attachment = None
            self.observer._forget()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _on_pass(self, optimizer: PairedOptimizer, when: str) -> None:
        observer = self.observer
        if optimizer.generation != self._generation:  # after a load or a reset: another point
            self._generation = optimizer.generation
            observer._forget()
        if when == "before_move":
            observer._first_gradient(self._gradients(), lambda p: p.detach().clone())
        elif when == "after_estimate":
            states, scalars = optimizer.state.items(), optimizer.diagnostics()
            d = {p: state["estimator"] for p, state in states if state.get("initialized")}
            point = _Point({p: p for p in d}, d, self._gradients())
            observer._second_gradient(int(scalars["step"]), scalars, point, self._exact)
        elif not optimizer.pending:  # a restart, or an interrupted move: no pair
            observer._pair = None

    def _exact(self, full_grad: Callable[[], Iterable[Tensor | None]]) -> Vectors:
        import torch

        with torch.enable_grad():
            of_loss = full_grad()
        return self._gradients(of_loss)

    def _gradients(self, of_loss: Iterable[Tensor | None] | None = None) -> Vectors:
        """Return the gradients as the optimizer sees them, with L2 decay and sign.

        From `of_loss`, one per parameter, or by default from `.grad`. Parameters without a gradient
        and frozen ones are left out.
        """
        gradients: Vectors = {}
        params = [(group, p) for group in self.optimizer.param_groups for p in group["params"]]
        of_loss = [p.grad for _, p in params] if of_loss is None else of_loss
        for (group, p), g in zip(params, of_loss, strict=True):
            if p.requires_grad and g is not None:
                sign = -1.0 if group["maximize"] else 1.0
                decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
                gradients[p] = sign * g.detach() + decay * p.detach()
        return gradients


def _square_distance(left: Vectors, right: Vectors) -> float:
    """Return |left - right|^2 over what both have, in float64."""
    differences = [left[key] - right[key] for key in left if key in right]
    if not differences or isinstance(differences[0], np.ndarray):
        return float(sum(v @ v for v in differences))
    import torch

    norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in differences]
    return float(torch.stack(norms).square().sum())


def _flat(x: Any) -> Vectors:
    blocks = x if isinstance(x, (list, tuple)) else [x]
    return {0: np.concatenate([np.array(block, np.float64).ravel() for block in blocks])}
