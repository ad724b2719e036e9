"""STORM+, simplified STORM+ and STORM: one template, and a rule for each.

One call of `update` is one sample. a_{t+1} and eta_t, and so x_{t+1}, are known before the
sample xi_{t+1} is drawn. A call therefore moves from x_t to x_{t+1}, evaluates `grad_fn`
there, and estimates: no previous iterate is stored, and the state has one buffer of the size
of the parameters.

| here                      | paper                                       |
|---------------------------|---------------------------------------------|
| `x`, `d`                  | x_t, d_t; with `_new`: x_{t+1}, d_{t+1}     |
| `g_tilde`, `g`            | g~_t, g_{t+1}                               |
| `a`, `eta`                | a_{t+1}, eta_t; with `_new`: the next ones  |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax._options import Number, NumberOrSchedule, Options
from stormplus.jax._trees import (
    OptimizedLeaves,
    PyTree,
    TreeOrFunction,
    accumulator_dtype,
    is_masked,
    norm,
    safe_increment,
    square_norm,
    wide_dtype,
)
from stormplus.rules import (
    Rule,
    SimplifiedStormPlusRule,
    StormPlusRule,
    StormRule,
    Sum,
    Sums,
)


class StormState(NamedTuple):
    """The state of `storm_plus`, `simplified_storm_plus` and `storm`.

    Attributes:
        step: t, the number of samples in the sums.
        moves: The number of moves: the argument of a schedule.
        started: Whether there is an estimator to move along. False before the first call
            and after a second gradient that was not finite. Set it to False to restart the
            estimator.
        skipped: Calls without effect, because the first gradient was not finite.
        restarts: Moves after which the gradient was not finite, so that the next call restarts
            the estimator.
        mismatch: At the last start, the distance between grad_fn(x) and the gradient passed to
            `update`, relative to the latter; see `verify`.
        gain: a_{t+1}.
        step_size: eta_t.
        unit: The unit of the gradient in use; 1 until "first" has seen a gradient.
        sum_g_sq: The sum of |g_i / unit|^2.
        sum_d_sq_over_a: The sum of |d_i / unit|^2 / a_{i+1}.
        estimator: d_t, like the parameters but float32 or wider.
    """

    step: jax.Array
    moves: jax.Array
    started: jax.Array
    skipped: jax.Array
    restarts: jax.Array
    mismatch: jax.Array
    gain: jax.Array
    step_size: jax.Array
    unit: jax.Array
    sum_g_sq: Sum
    sum_d_sq_over_a: Sum
    estimator: PyTree


# The signatures are written out: `optax.inject_hyperparams` reads them.
def storm_plus(
    lr: NumberOrSchedule = 1.0,
    *,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    unit: Number | str = 1.0,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """STORM+, Algorithm 1.

    `tx.update(g_tilde, state, params, grad_fn=grad_fn)`: `grad_fn` is a function of the
    parameters that returns the gradient on this call's sample, and `g_tilde` is
    `grad_fn(params)`. The first call returns a zero update. Do not chain anything before or
    after it; pass the arguments below instead.

    Args:
        lr: Multiplies eta_t in the move and enters no rule: a number, or a schedule, which is
            a function of the number of previous moves.
        weight_decay: L2, part of the objective: in both gradients, and so in the norms.
        decoupled_weight_decay: Instead, `x <- x - lr eta_t (d / unit + weight_decay x)`.
        maximize: Ascend: the gradients change sign, the weight decay does not.
        unit: The unit of the gradient. The rule sees g / unit and d / unit, and the move is
            `x <- x - lr eta_t d / unit`, as if the loss were divided by it. 1.0 is the paper.
            "first" takes the norm of the first gradient that is not zero: nothing depends on
            the scale of the loss, and the first move has a length of about `lr`.
        mask: A tree of booleans (or a prefix, or a function): which leaves are optimized.
            The others get a zero update and have no buffer.
        gradient_transform: A stateless optax transformation such as clipping, applied to
            both gradients of the optimized leaves, before the weight decay.
    """
    options = Options(
        lr=lr,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        unit=unit,
        mask=mask,
        gradient_transform=gradient_transform,
    )
    return _paired(StormPlusRule(), options)


def simplified_storm_plus(
    lr: NumberOrSchedule = 1.0,
    *,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    unit: Number | str = 1.0,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Simplified STORM+, Sec. 4.2: a_{t+1} = t^(-2/3). The arguments are `storm_plus`'s."""
    options = Options(
        lr=lr,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        unit=unit,
        mask=mask,
        gradient_transform=gradient_transform,
    )
    return _paired(SimplifiedStormPlusRule(), options)


def storm(
    lr: NumberOrSchedule = 1.0,
    *,
    theta: Number = 0.1,
    w: Number = 0.1,
    c: Number = 100.0,
    smoothness: Number = 1.0,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    unit: Number | str = 1.0,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """STORM (Cutkosky & Orabona 2019).

    `theta` is the numerator of the step size, `w` the offset under its cube root, `c` the
    factor of the gain, `smoothness` the L of the objective, all positive. The other
    arguments are `storm_plus`'s.
    """
    options = Options(
        lr=lr,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        unit=unit,
        mask=mask,
        gradient_transform=gradient_transform,
    )
    return _paired(StormRule(theta, w, c, smoothness), options)  # type: ignore[arg-type]


def _paired(rule: Rule, options: Options) -> optax.GradientTransformationExtraArgs:
    """Return the template: corrected momentum with the gain and the step size of `rule`."""

    def init(params: PyTree) -> StormState:
        if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
            raise TypeError(
                "optax.masked or optax.partition has replaced parameters by optax.MaskedNode, but "
                "grad_fn can only be evaluated at all the parameters: pass mask= instead"
            )
        optimized = OptimizedLeaves(params, options.mask)
        d = [jnp.zeros_like(x_i, dtype=wide_dtype(x_i)) for x_i in optimized.leaves]

        # A new array per field: a buffer that occurs twice cannot be donated.
        def count() -> jax.Array:
            return jnp.zeros((), jnp.int32)

        def scalar() -> jax.Array:
            return jnp.zeros((), accumulator_dtype())

        return StormState(
            step=count(),
            moves=count(),
            started=jnp.zeros((), jnp.bool_),
            skipped=count(),
            restarts=count(),
            mismatch=scalar(),
            gain=scalar() + 1,
            step_size=scalar(),
            unit=scalar() + (1 if isinstance(options.unit, str) else options.unit),
            sum_g_sq=Sum(scalar(), scalar()),
            sum_d_sq_over_a=Sum(scalar(), scalar()),
            estimator=optimized.tree(d),
        )

    def update(
        updates: PyTree,
        state: StormState,
        params: PyTree | None = None,
        *,
        grad_fn: Callable[[PyTree], PyTree] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, StormState]:
        del extra_args  # meant for other transformations
        if params is None or not callable(grad_fn):
            raise TypeError(
                "update needs the parameters and grad_fn, the gradient as a function of the "
                "parameters on this call's sample: `tx.update(grad_fn(params), state, params, "
                f"grad_fn=grad_fn)`; got {type(params).__name__} as params and {grad_fn!r} as "
                "grad_fn"
            )
        optimized = OptimizedLeaves(params, options.mask)
        x, d = optimized.leaves, optimized.buffers(state.estimator)
        passed = optimized.gradient(updates, "the first argument of update()")
        g_tilde = options.objective_gradient(optimized, passed, x)

        # Beyond the paper: gradients that are not finite, or too large for the dtype of the sums.
        # If the first one is, the call has no effect. If the second one is, the move stands,
        # because it depends on no gradient of this sample; the sums are kept, and the next call
        # restarts the estimator.
        unit = options.unit_at(state.unit, state.sum_g_sq.total, g_tilde)
        first_finite = jnp.isfinite(square_norm(g_tilde, unit))

        # Without an estimator a = 1 and eta = 0: x stays and d <- g, as in Alg. 1, line 1.
        a = jnp.where(state.started, state.gain, 1)
        eta = jnp.where(state.started & first_finite, state.step_size, 0)

        # MOVE
        lr = options.lr(state.moves) if callable(options.lr) else options.lr
        # Beyond the paper: decoupled weight decay, which no gradient and no norm contains.
        decay = options.decay(x, decoupled=True)
        alpha = lr * eta
        moves = [
            (-alpha.astype(d_i.dtype) * (d_i / unit.astype(d_i.dtype) + decay_i)).astype(x_i.dtype)
            for d_i, decay_i, x_i in zip(d, decay, x)
        ]
        move = optimized.tree(moves, fill=jnp.zeros_like)
        moved = optax.apply_updates(params, move)  # Alg. 1, line 4
        x_new = optimized.select(jax.tree.leaves(moved))

        # ESTIMATE
        returned = optimized.gradient(grad_fn(moved), "what grad_fn returns")
        g = options.objective_gradient(optimized, returned, x_new)  # Alg. 1, line 5
        d_new = [
            g_i + (1 - a.astype(d_i.dtype)) * (d_i - g_tilde_i)  # Alg. 1, line 6
            for g_i, d_i, g_tilde_i in zip(g, d, g_tilde)
        ]
        d_new = [jnp.where(first_finite, new, old) for new, old in zip(d_new, d)]

        g_sq, d_sq = square_norm(g, unit), square_norm(d_new, unit)
        sums = Sums(state.sum_g_sq, state.sum_d_sq_over_a)
        t = safe_increment(state.step).astype(accumulator_dtype())
        sums_new, a_new, eta_new = rule(sums, g_sq, d_sq, t)  # Alg. 1, line 3

        second_finite = jnp.isfinite(jnp.stack([*jax.tree.leaves(sums_new), a_new, eta_new])).all()
        accepted = first_finite & second_finite

        def if_accepted(new: Any, old: jax.Array) -> jax.Array:
            return jnp.where(accepted, new, old).astype(old.dtype)

        # A non-finite estimator is never read, because the next call restarts it, but no state
        # should contain a NaN. Testing whole leaves would be another pass over memory.
        d_new = [jnp.where(jnp.isfinite(d_i), d_i, 0) for d_i in d_new]

        mismatch = jax.lax.cond(
            state.started,
            lambda: state.mismatch,
            # At a start x_new is x, and both gradients must be the same.
            lambda: _relative_difference(returned, passed).astype(state.mismatch.dtype),
        )
        return move, StormState(
            step=safe_increment(state.step, accepted),
            moves=safe_increment(state.moves, first_finite & state.started),
            started=jnp.where(first_finite, second_finite, state.started),
            skipped=safe_increment(state.skipped, ~first_finite),
            restarts=safe_increment(state.restarts, first_finite & ~second_finite),
            mismatch=if_accepted(mismatch, state.mismatch),
            gain=if_accepted(a_new, state.gain),
            step_size=if_accepted(eta_new, state.step_size),
            unit=if_accepted(unit, state.unit),
            sum_g_sq=jax.tree.map(if_accepted, sums_new.sum_g_sq, sums.sum_g_sq),
            sum_d_sq_over_a=jax.tree.map(
                if_accepted, sums_new.sum_d_sq_over_a, sums.sum_d_sq_over_a
            ),
            estimator=optimized.tree(d_new),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _relative_difference(new: list[jax.Array], old: list[jax.Array]) -> jax.Array:
    """Return |new - old| / |old|, or |new - old| if old is zero."""
    size = norm(old)
    difference = norm([new_i - old_i for new_i, old_i in zip(new, old)])
    return difference / jnp.where(size == 0, 1, size)
