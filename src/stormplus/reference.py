"""`minimize`: Algorithm 1 in NumPy float64, to be read beside the paper.

It is slow and obvious: it stores the previous iterate and evaluates both gradients where the paper
does. JAX is tested against it; torch against tests/support/oracle.py, which shares no code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stormplus.rules import Rule, Sums, check_unit, make_rule

try:
    from scipy.optimize import OptimizeResult
except ImportError:

    class OptimizeResult(dict):  # type: ignore[no-redef,type-arg]
        """A dict with attribute access, like SciPy's class of this name."""

        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None


Array: TypeAlias = NDArray[np.float64]

HISTORY = ("gain", "step_size", "grad_norm", "estimator_norm", "sum_g_sq", "sum_d_sq_over_a")


def minimize(
    grad: Callable[[Any, Any], Any],
    x0: Any,
    sample: Callable[[np.random.Generator], Any] | None,
    steps: int,
    *,
    method: str | Rule = "storm+",
    lr: float | Sequence[float] | Callable[[int], float | Sequence[float]] = 1.0,
    unit: float | str = 1.0,
    rng: np.random.Generator | int | None = None,
    callback: Callable[[OptimizeResult], Any] | None = None,
    **rule_options: float,
) -> OptimizeResult:
    """Find a stationary point of E[f(x; xi)] with STORM+ or another rule of its family.

    Args:
        grad: `grad(x, xi)`, the gradient of f(.; xi) at x, shaped like `x0`.
        x0: x_1: an array, a list of numbers (a vector), or a list of arrays ("blocks").
        sample: `sample(rng)` draws one xi. None, or a function that returns None, for a
            deterministic objective.
        steps: T, the number of samples; 2T - 1 gradients are evaluated.
        method: A name, as for `stormplus.rules.make_rule`, or a rule object.
        lr: Multiplies eta_t in the move, and enters no rule: a number, one number per
            block, or a function of t (1, 2, ...) that returns either.
        unit: The unit of the gradient: the run is that of f / unit. 1.0 is the paper; "first"
            takes the norm of the first gradient that is not zero.
        rng: A generator or a seed, passed to `sample`. Its stream is used for nothing else.
        callback: `callback(result)` after each sample, with the result so far.
            `StopIteration` ends the run. Any other exception, also `KeyboardInterrupt`,
            propagates with the result so far as its attribute `result`.
        **rule_options: The constants of the rule, if `method` is a name.

    Returns:
        A `scipy.optimize.OptimizeResult` (without SciPy, a dict with the same attributes): `x`
        (x_T), `x_uniform` (uniform over x_1..x_T, the paper's output), `nit`, `ngev`,
        `estimator` (d_T), `gain` (a_{T+1}), `step_size` (eta_T), the sums, `unit`, and
        `history`, a dict from each scalar's name to an array with one entry per sample.

    Raises:
        FloatingPointError: A gradient is not finite; its attribute `result` is the result up to
            the sample before.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    check_unit(unit)
    rule = make_rule(method, **rule_options)
    rng = np.random.default_rng(rng)
    # A separate stream: choosing x_uniform does not change the samples.
    (reservoir,) = rng.spawn(1)

    single = not isinstance(x0, (list, tuple)) or all(map(np.isscalar, x0))
    blocks = [_as_float64(block) for block in ([x0] if single else x0)]
    sizes = [block.size for block in blocks]

    def shaped(v: Array) -> Any:
        """Return a copy of a vector of all coordinates, shaped like `x0`."""
        vectors = np.split(v, np.cumsum(sizes)[:-1])
        parts = [part.reshape(block.shape).copy() for part, block in zip(vectors, blocks)]
        return parts[0] if single else parts

    def gradient(x: Array, xi: Any) -> Array:
        g = grad(shaped(x), xi)
        return _as_vector([g] if single else g, blocks)

    if not callable(lr):
        _per_block(lr, len(blocks))  # raise before the first sample is drawn
    # Beyond the paper: g_0, the unit of the gradient. While all are zero it is 1.
    unit_is_known, g_0 = (False, 1.0) if unit == "first" else (True, float(unit))
    x = d = np.concatenate([block.ravel() for block in blocks])
    a = eta = 1.0
    sums, result = Sums(), _Progress(shaped, x)
    try:
        for t in range(1, steps + 1):
            xi = None if sample is None else sample(rng)
            if t == 1:
                d = g = gradient(x, xi)  # Alg. 1, line 1
            else:
                lr_t = np.repeat(_per_block(lr(t - 1) if callable(lr) else lr, len(blocks)), sizes)
                x_new = x - lr_t * eta * (d / g_0)  # Alg. 1, line 4
                g, g_tilde = gradient(x_new, xi), gradient(x, xi)  # Alg. 1, line 5
                d = g + (1 - a) * (d - g_tilde)  # Alg. 1, line 6
                x = x_new
            # Checked below. Floats of NumPy overflow to infinity, where Python's would raise.
            with np.errstate(over="ignore", invalid="ignore"):
                g_norm, d_norm = np.float64(np.sqrt(g @ g)), np.float64(np.sqrt(d @ d))
                if not unit_is_known and g_norm > 0:
                    unit_is_known, g_0 = True, g_norm
                in_units = (g_norm / g_0) ** 2, (d_norm / g_0) ** 2
                sums, a, eta = rule(sums, *in_units, t)  # Alg. 1, line 3
            if not np.isfinite(sums.sum_d_sq_over_a.total):
                raise FloatingPointError(
                    f"gradients of norm {g_norm} are too large for the sums: pass unit='first', "
                    "or divide f by a constant"
                )
            result.record(
                x=x,
                estimator=d,
                uniform=reservoir.integers(t) == 0,  # Alg. 1, line 8
                unit=g_0,
                gain=a,
                step_size=eta,
                grad_norm=g_norm,
                estimator_norm=d_norm,
                sum_g_sq=sums.sum_g_sq.total,
                sum_d_sq_over_a=sums.sum_d_sq_over_a.total,
            )
            if callback is not None:
                try:
                    callback(result.so_far("in progress"))
                except StopIteration:
                    return result.so_far(f"stopped by the callback after {t} samples")
    except BaseException as error:  # also KeyboardInterrupt
        error.result = result.so_far(f"ended by {error!r}")  # type: ignore[attr-defined]
        raise
    return result.so_far("all samples used", success=True)


class _Progress:
    """The result so far."""

    def __init__(self, shaped: Callable[[Array], Any], x: Array) -> None:
        self.shaped, self.nit = shaped, 0
        self.vectors = {"x": x, "x_uniform": x}
        self.scalars: dict[str, float] = {}
        self.rows = np.empty((64, len(HISTORY)))  # doubled when it is full

    def record(self, *, x: Array, estimator: Array, uniform: bool, **scalars: float) -> None:
        if self.nit == len(self.rows):
            self.rows = np.concatenate([self.rows, np.empty_like(self.rows)])
        self.rows[self.nit] = [scalars[name] for name in HISTORY]
        self.nit += 1
        self.scalars = {name: float(value) for name, value in scalars.items()}
        self.vectors.update(x=x, estimator=estimator)
        if uniform:  # with probability 1/t: reservoir sampling
            self.vectors["x_uniform"] = x

    def so_far(self, message: str, *, success: bool = False) -> OptimizeResult:
        result = OptimizeResult()
        result.update({name: self.shaped(vector) for name, vector in self.vectors.items()})
        result.update(self.scalars)
        result.update(
            nit=self.nit,
            ngev=max(2 * self.nit - 1, 0),
            # Views: rows that are recorded do not change, and a callback per step is cheap.
            history={name: self.rows[: self.nit, i] for i, name in enumerate(HISTORY)},
            success=success,
            status=0 if success else 1,
            message=message,
        )
        return result


def _as_float64(block: Any) -> Array:
    if np.iscomplexobj(block):
        raise TypeError("x0 must be real, got complex numbers: pass real and imaginary parts")
    array = np.array(block, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"x0 must be finite, got {array}")
    return array


def _per_block(lr: Any, blocks: int) -> Array:
    rates = np.asarray(lr, dtype=np.float64)
    if rates.ndim > 1 or (rates.ndim == 1 and len(rates) != blocks):
        raise ValueError(f"lr must be a number or one number per block ({blocks}), got {lr!r}")
    if not (np.isfinite(rates).all() and (rates >= 0).all()):
        raise ValueError(f"lr must be finite and not negative, got {lr!r}")
    return np.broadcast_to(rates, blocks)


def _as_vector(g: Any, x: list[Array]) -> Array:
    """Return the blocks of a gradient as one vector."""
    if len(g) != len(x):
        raise ValueError(f"grad must return {len(x)} blocks, as x0 has, got {len(g)}")
    blocks = [np.asarray(g_i, dtype=np.float64) for g_i in g]
    for i, (g_i, x_i) in enumerate(zip(blocks, x)):
        if g_i.shape != x_i.shape:
            raise ValueError(f"block {i} of x0 is {x_i.shape}, its gradient {g_i.shape}")
        if not np.isfinite(g_i).all():
            raise FloatingPointError(f"the gradient of block {i} is not finite: {g_i}")
    return np.concatenate([g_i.ravel() for g_i in blocks])
