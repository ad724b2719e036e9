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
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax.core.options import Number, NumberOrSchedule, Options
from stormplus.jax.core.trees import (
    PyTree,
    TreeOrFunction,
    all_finite,
    counted,
    estimator_dtype,
    is_hole,
    sums_dtype,
)
from stormplus.rules import (
    NORMS,
    Rule,
    SimplifiedStormPlusRule,
    StormPlusRule,
    StormRule,
    Sum,
    Sums,
    check_choice,
)


class StormState(NamedTuple):
    """What is carried from call to call.

    Attributes:
        step: t, the samples that have entered the sums.
        moves: The moves made: what a schedule is evaluated at.
        started: Whether there is an estimator to move along. False before the first call
            and after a second evaluation that was not finite. Setting it to False restarts
            the estimator at will.
        skipped: Calls without effect, because the first gradient was not finite.
        restarts: Moves after which the gradient was not finite, so that the estimator
            starts anew at the next call.
        mismatch: At the last start, the distance between grad_fn(x) and the gradient handed
            over, relative to the latter; see `verify`.
        gain: a_{t+1}. This and the next three have shape () with scope "global", else one
            entry per bucket.
        step_size: eta_t.
        sum_g_sq: The sum of |g_i|^2.
        sum_d_sq_over_a: The sum of |d_i|^2 / a_{i+1}.
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
    norm: str = "raw",
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """STORM+, Algorithm 1.

    `tx.update(g_tilde, state, params, grad_fn=grad_fn)`: `grad_fn` is a function of the
    parameters that returns the gradient on this call's sample, and `g_tilde` is
    `grad_fn(params)`. The first call returns a zero update. Nothing may be chained before
    or after it: what would be is an argument here.

    Args:
        lr: Multiplies eta_t in the move and enters no rule: a number, or a schedule of the
            moves made before (0 at the first).
        weight_decay: L2, part of the objective: in both gradients, and so in the norms.
        decoupled_weight_decay: Instead, `x <- x - lr eta_t (d + weight_decay x)`.
        maximize: Ascend: the gradients change sign, the weight decay does not.
        norm: What |.|^2 means in the rules: "raw" (the paper), or "mean": divided by the
            number of optimised elements that share the sums.
        scope: Which leaves share the sums: "global" (the paper), "group", "tensor".
        groups: With scope "group", a tree of labels (or a prefix of one, or a function of
            the parameters that returns one): leaves of one label share the sums.
        mask: A tree of booleans (or a prefix, or a function): which leaves are optimised.
            The others get a zero update and have no buffer.
        gradient_transform: A stateless optax transformation such as clipping, applied to
            both gradients of the optimised leaves, before the weight decay.
    """
    return _paired("storm_plus", StormPlusRule(), norm, Options.of(locals()))


def simplified_storm_plus(
    lr: NumberOrSchedule = 1.0,
    *,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    norm: str = "raw",
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Simplified STORM+, Sec. 4.2: a_{t+1} = t^(-2/3). The arguments are `storm_plus`'s."""
    options = Options.of(locals())
    return _paired("simplified_storm_plus", SimplifiedStormPlusRule(), norm, options)


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
    norm: str = "raw",
    scope: str = "global",
    groups: TreeOrFunction = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """STORM (Cutkosky & Orabona 2019).

    `theta` is the numerator of the step size, `w` the offset under its cube root, `c` the
    factor of the gain, `smoothness` the L of the objective, all positive. The other
    arguments are `storm_plus`'s.
    """
    options = Options.of(locals())
    constants = {"theta": theta, "w": w, "c": c, "smoothness": smoothness}
    return _paired("storm", _storm_rule(constants), norm, options)


def _storm_rule(constants: dict[str, Any]) -> Rule:
    """STORM's rule, of constants that may be arrays: those may be traced, and are not checked."""
    StormRule(**{k: v for k, v in constants.items() if not isinstance(v, jax.Array)})  # raises
    return partial(StormRule.__call__, cast(StormRule, SimpleNamespace(**constants)))


def _paired(
    name: str, rule: Rule, norm: str, options: Options
) -> optax.GradientTransformationExtraArgs:
    """The template: corrected momentum with the gain and the step size of `rule`."""
    check_choice("norm", norm, NORMS)

    def init(params: PyTree) -> StormState:
        _refuse_holes(name, params)
        layout = options.layout(params)
        d = [jnp.zeros_like(x_i, dtype=estimator_dtype(x_i)) for x_i in layout.x]

        # Each call makes an array of its own: a donated buffer must not occur twice.
        def count() -> jax.Array:
            return jnp.zeros((), jnp.int32)

        def scalar() -> jax.Array:
            return jnp.zeros(layout.shape, sums_dtype())

        return StormState(
            step=count(),
            moves=count(),
            started=jnp.zeros((), jnp.bool_),
            skipped=count(),
            restarts=count(),
            mismatch=jnp.zeros((), sums_dtype()),
            gain=jnp.ones(layout.shape, sums_dtype()),
            step_size=scalar(),
            sum_g_sq=Sum(scalar(), scalar()),
            sum_d_sq_over_a=Sum(scalar(), scalar()),
            estimator=layout.with_holes(d),
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
            raise TypeError(_HOW_TO_CALL.format(params=_given(params), grad_fn=_given(grad_fn)))
        layout = options.layout(params)
        x, d = layout.x, layout.buffer(state.estimator)
        handed_over = layout.gradient(updates, "the first argument of update()")
        g_tilde = options.gradient(layout, handed_over, x)

        # Beyond the paper: gradients that are not finite, or too large for the sums' dtype.
        # The first one: nothing happens. The second: the move stands, for it depends on no
        # gradient of this sample; the sums do not, and the estimator starts anew.
        g_tilde_sq = layout.square_norm(g_tilde, norm)
        first = jnp.isfinite(g_tilde_sq).all()

        # Without an estimator a = 1 and eta = 0: x stays and d <- g, as in Alg. 1, line 1.
        a = jnp.where(state.started, state.gain, 1)
        eta = jnp.where(state.started & first, state.step_size, 0)

        # MOVE
        lr = options.lr_at(state.moves)
        # Beyond the paper: decoupled weight decay, which no gradient and no norm contains.
        direction = [d_i + decay_i for d_i, decay_i in zip(d, options.decay(x, decoupled=True))]
        move = layout.with_zeros(
            (-eta_i * direction_i).astype(x_i.dtype)
            for eta_i, direction_i, x_i in zip(layout.each(lr * eta), direction, x)
        )
        moved = optax.apply_updates(params, move)  # Alg. 1, line 4
        x_new = layout.select(jax.tree.leaves(moved))

        # ESTIMATE
        returned = layout.gradient(grad_fn(moved), "what grad_fn returns")
        g = options.gradient(layout, returned, x_new)  # Alg. 1, line 5
        d_new = [
            g_i + (1 - a_i) * (d_i - g_tilde_i)  # Alg. 1, line 6
            for g_i, a_i, d_i, g_tilde_i in zip(g, layout.each(a), d, g_tilde)
        ]
        d_new = [jnp.where(first, new, old) for new, old in zip(d_new, d)]

        g_sq, d_sq = (layout.square_norm(v, norm) for v in (g, d_new))
        sums = Sums(state.sum_g_sq, state.sum_d_sq_over_a)
        t = counted(state.step).astype(sums_dtype())
        sums_new, a_new, eta_new = rule(sums, g_sq, d_sq, t)  # Alg. 1, line 3

        second = all_finite((sums_new, a_new, eta_new))
        accepted = first & second

        def kept(new: Any, old: jax.Array) -> jax.Array:
            return jnp.where(accepted, new, old).astype(old.dtype)

        def difference() -> jax.Array:
            """At a start both were taken at one point, and must be one gradient."""
            scale = jnp.max(layout.rms(handed_over), initial=0)  # 1e-20 has no square in float32
            scale = jnp.where(scale == 0, 1, scale)
            apart = [(new - old) / scale for new, old in zip(returned, handed_over)]
            old = [g / scale for g in handed_over]
            off, size = (layout.square_norm(v, "raw").sum() for v in (apart, old))
            return jnp.sqrt(off / jnp.where(size == 0, 1, size)).astype(state.mismatch.dtype)

        mismatch = jax.lax.cond(state.started, lambda: state.mismatch, difference)
        return move, StormState(
            step=counted(state.step, accepted),
            moves=counted(state.moves, first & state.started),
            started=jnp.where(first, second, state.started),
            skipped=counted(state.skipped, ~first),
            restarts=counted(state.restarts, first & ~second),
            mismatch=kept(mismatch, state.mismatch),
            gain=kept(a_new, state.gain),
            step_size=kept(eta_new, state.step_size),
            sum_g_sq=jax.tree.map(kept, sums_new.sum_g_sq, state.sum_g_sq),
            sum_d_sq_over_a=jax.tree.map(kept, sums_new.sum_d_sq_over_a, state.sum_d_sq_over_a),
            estimator=layout.with_holes([_finite(d_i) for d_i in d_new]),
        )

    return optax.GradientTransformationExtraArgs(init, update)


_HOW_TO_CALL = (
    "update needs the parameters and grad_fn, the gradient as a function of the parameters on "
    "this call's sample: `grad_fn = lambda p: jax.grad(loss)(p, batch)`, then "
    "`tx.update(grad_fn(params), state, params, grad_fn=grad_fn)`; got {params} as params and "
    "{grad_fn} as grad_fn"
)


def _given(value: Any) -> str:
    return repr(value) if value is None else f"a {type(value).__name__}"


def _refuse_holes(name: str, params: PyTree) -> None:
    mask = jax.tree.map(lambda leaf: not is_hole(leaf), params, is_leaf=is_hole)
    if not all(jax.tree.leaves(mask)):
        raise TypeError(
            "the parameters have holes (optax.MaskedNode), as optax.masked and optax.partition "
            "make them, and grad_fn can only be evaluated at all the parameters; instead of "
            f"masking from outside write `{name}(mask={mask})`"
        )


def _finite(leaf: jax.Array) -> jax.Array:
    # After a gradient that is not finite the estimator is not read before it is written.
    # It is made finite all the same: no state has a NaN in it. Elementwise, because a
    # test of the whole would be one more pass over memory.
    return jnp.where(jnp.isfinite(leaf), leaf, 0)
