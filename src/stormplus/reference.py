"""`minimize`: Algorithm 1 in NumPy float64, to be read beside the paper.

This is the oracle every other backend is tested against, so it is slow and obvious: it
keeps the previous iterate, evaluates both gradients where the paper does, and shares
with the fast code nothing but the scalar rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult

from stormplus.rules import NORMS, SCOPES, Sums, check_choice, make_rule

Array: TypeAlias = NDArray[np.float64]
Blocks: TypeAlias = list[Array]

HISTORY = ("gain", "step_size", "grad_norm", "estimator_norm", "sum_g_sq", "sum_d_sq_over_a")


def minimize(
    grad: Callable[[Any, Any], Any],
    x0: Any,
    sample: Callable[[np.random.Generator], Any] | None,
    steps: int,
    *,
    method: str = "storm+",
    lr: float | Sequence[float] | Callable[[int], float | Sequence[float]] = 1.0,
    norm: str = "raw",
    scope: str = "global",
    rng: np.random.Generator | int | None = None,
    callback: Callable[[OptimizeResult], Any] | None = None,
    **rule_options: float,
) -> OptimizeResult:
    """Find a stationary point of E[f(x; xi)] with STORM+, simplified STORM+ or STORM.

    Args:
        grad: `grad(x, xi)`, the gradient of f(.; xi) at x, shaped like `x0`.
        x0: x_1: an array, or a list of arrays ("blocks").
        sample: `sample(rng)` draws one xi. None, or a function that returns None, for a
            deterministic objective.
        steps: T, the number of samples; 2T - 1 gradients are evaluated.
        method: "storm+", "simplified-storm+" or "storm".
        lr: Multiplies eta_t in the move, and enters no rule: a number, one number a
            block, or a function of t (1, 2, ...) that returns either.
        norm: "raw" (the paper), or "mean": |.|^2 divided by the number of elements.
        scope: Which blocks make a bucket, that is, share one set of sums. "global" (the
            paper): all of them. "group" and "tensor": each block is a bucket of its own.
        rng: A generator or a seed, handed to `sample`. Its stream is used for nothing else.
        callback: `callback(result)` after each sample, with the result so far.
            `StopIteration` ends the run; any other exception leaves with the result so far
            as its attribute `result`, and so does `KeyboardInterrupt`.
        **rule_options: For "storm": `theta`, `w`, `c`, `smoothness`.

    Returns:
        A `scipy.optimize.OptimizeResult`: `x` (x_T), `x_uniform` (uniform over
        x_1..x_T, the paper's output), `nit`, `ngev`, `estimator` (d_T), `gain`
        (a_{T+1}), `step_size` (eta_T), the sums, and `history`, a dict of one array a
        quantity with one row a sample. With a scope other than "global" the scalars are
        arrays, one entry a bucket.

    Raises:
        TypeError: A function that is not callable, an unknown rule option.
        ValueError: steps < 1, an unknown name, a gradient of the wrong shape.
        FloatingPointError: A gradient that is not finite; its attribute `result` is the
            result up to the sample before.
    """
    _check_functions(grad=grad, sample=sample, callback=callback)
    _check_steps(steps)
    check_choice("norm", norm, NORMS)
    check_choice("scope", scope, SCOPES)
    rule = make_rule(method, **rule_options)
    rng = np.random.default_rng(rng)
    # A child's stream: choosing x_uniform leaves the stream of the samples untouched.
    (reservoir,) = rng.spawn(1)

    single = not isinstance(x0, (list, tuple))
    x = [_as_float64(block) for block in ([x0] if single else x0)]
    if not x:
        raise ValueError("x0 must have at least one block, got an empty list")

    def gradient(at: Blocks, xi: Any) -> Blocks:
        g = grad(at[0].copy() if single else [block.copy() for block in at], xi)
        return _checked_gradient([g] if single else g, at)

    def square_norm(blocks: Blocks) -> Any:
        """|.|^2 as the rules see it: one number, or one a bucket."""
        squares = np.array([np.vdot(block, block) for block in blocks])
        sizes = np.array([block.size for block in blocks])
        if scope == "global":
            squares, sizes = squares.sum(), sizes.sum()
        return squares / np.maximum(sizes, 1) if norm == "mean" else squares

    if not callable(lr):
        _per_block(lr, len(x))  # a bad one is refused before the first sample is drawn
    d: Blocks = []
    a = eta = np.ones(())
    sums, result = Sums(), _Progress(single, scope, x)
    try:
        for t in range(1, steps + 1):
            xi = None if sample is None else sample(rng)
            if t == 1:
                d = g = gradient(x, xi)  # Alg. 1, line 1
            else:
                lr_t = _per_block(lr(t - 1) if callable(lr) else lr, len(x))
                step = lr_t * eta
                x_new = [x_i - s_i * d_i for x_i, s_i, d_i in zip(x, step, d)]  # Alg. 1, line 4
                g, g_tilde = gradient(x_new, xi), gradient(x, xi)  # Alg. 1, line 5
                d = [
                    g_i + (1 - a_i) * (d_i - g_tilde_i)  # Alg. 1, line 6
                    for g_i, a_i, d_i, g_tilde_i in zip(g, np.broadcast_to(a, len(x)), d, g_tilde)
                ]
                x = x_new
            g_sq, d_sq = square_norm(g), square_norm(d)
            with np.errstate(over="ignore", invalid="ignore"):  # looked at in the next line
                sums, a, eta = rule(sums, g_sq, d_sq, t)  # Alg. 1, line 3
            if not np.isfinite(sums.sum_d_sq_over_a.total).all():
                raise FloatingPointError(
                    f"gradients of norm {np.sqrt(g_sq)} are too large for the sums: scale f down"
                )
            result.record(
                x=x,
                estimator=d,
                uniform=reservoir.integers(t) == 0,  # Alg. 1, line 8
                gain=a,
                step_size=eta,
                grad_norm=np.sqrt(g_sq),
                estimator_norm=np.sqrt(d_sq),
                sum_g_sq=sums.sum_g_sq.total,
                sum_d_sq_over_a=sums.sum_d_sq_over_a.total,
            )
            if callback is not None:
                try:
                    callback(result.so_far("in progress"))
                except StopIteration:
                    return result.so_far(f"stopped by the callback after {t} samples")
    except BaseException as error:  # KeyboardInterrupt too: nothing is lost
        error.result = result.so_far(f"ended by {error!r}")  # type: ignore[attr-defined]
        raise
    return result.so_far("all samples used", success=True)


class _Progress:
    """The result so far."""

    def __init__(self, single: bool, scope: str, x: Blocks) -> None:
        self.single, self.scope, self.nit = single, scope, 0
        self.fields: dict[str, Any] = {"x": x, "x_uniform": x}
        self.rows: dict[str, list[Any]] = {name: [] for name in HISTORY}

    def record(self, *, x: Blocks, estimator: Blocks, uniform: bool, **scalars: Any) -> None:
        self.nit += 1
        self.fields.update(x=x, estimator=estimator)
        if uniform:  # with probability 1/t: reservoir sampling
            self.fields["x_uniform"] = x
        for name in HISTORY:
            value: Any
            if self.scope == "global":
                value = float(scalars[name])
            else:  # simplified STORM+ has one `a` for all buckets
                value = np.broadcast_to(scalars[name], len(x)).copy()
            self.rows[name].append(value)
            self.fields[name] = value

    def so_far(self, message: str, *, success: bool = False) -> OptimizeResult:
        fields = dict(self.fields)
        for name in ("x", "x_uniform", "estimator"):
            if name in fields:
                blocks = [block.copy() for block in fields[name]]
                fields[name] = blocks[0] if self.single else blocks
        result = OptimizeResult()
        result.update(fields)
        result.update(
            {
                "nit": self.nit,
                "ngev": max(2 * self.nit - 1, 0),
                "history": _History(self.rows, self.nit),
                "success": success,
                "status": 0 if success else 1,
                "message": message,
            }
        )
        return result


class _History(Mapping[str, Array]):
    """One array a quantity, made when it is read: a callback at each step stays cheap."""

    def __init__(self, rows: dict[str, list[Any]], length: int) -> None:
        self._rows, self._length = rows, length

    def __getitem__(self, name: str) -> Array:
        return np.array(self._rows[name][: self._length], dtype=np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _check_functions(**functions: Any) -> None:
    for name, function in functions.items():
        if not callable(function) and (function is not None or name == "grad"):
            raise TypeError(f"{name} must be a function, got {function!r}")


def _check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)):
        raise TypeError(f"steps must be an integer, got {steps!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")


def _as_float64(block: Any) -> Array:
    if np.iscomplexobj(block):
        raise TypeError("x0 must be real, got complex numbers: give real and imaginary parts")
    array = np.array(block, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"x0 must be finite, got {array}")
    return array


def _per_block(lr: Any, blocks: int) -> Array:
    try:
        rates = np.asarray(lr, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"lr must be a number or one number a block, got {lr!r}") from None
    if rates.ndim > 1 or (rates.ndim == 1 and len(rates) != blocks):
        raise ValueError(f"lr must be a number or one number a block ({blocks}), got {lr!r}")
    if not (np.isfinite(rates).all() and (rates >= 0).all()):
        raise ValueError(f"lr must be finite and not negative, got {lr!r}")
    return np.broadcast_to(rates, blocks)


def _checked_gradient(g: Any, x: Blocks) -> Blocks:
    if not isinstance(g, (list, tuple)):
        raise TypeError(f"x0 is a list of blocks, so grad must return a list, got {g!r}")
    if len(g) != len(x):
        raise ValueError(f"grad must return {len(x)} blocks, as x0 has, got {len(g)}")
    blocks = [np.array(g_i, dtype=np.float64) for g_i in g]
    for i, (g_i, x_i) in enumerate(zip(blocks, x)):
        if g_i.shape != x_i.shape:
            raise ValueError(
                f"grad must return the shape of x0: block {i} is {x_i.shape}, "
                f"its gradient {g_i.shape}"
            )
        if not np.isfinite(g_i).all():
            raise FloatingPointError(f"the gradient of block {i} is not finite: {g_i}")
        with np.errstate(over="ignore"):
            if not np.isfinite(np.vdot(g_i, g_i)):
                raise FloatingPointError(
                    f"the gradient of block {i} is too large to be squared: scale f down, {g_i}"
                )
    return blocks
