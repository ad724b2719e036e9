"""The template of the three methods: one call of `update` is one sample.

a_{t+1} and eta_t, and so x_{t+1}, are known before the sample xi_{t+1} is drawn. A call
therefore moves from x_t to x_{t+1}, evaluates `grad_fn` there, and estimates: no previous
iterate is stored, and the state has one buffer of the size of the parameters.

| here                      | paper                                       |
|---------------------------|---------------------------------------------|
| `x`, `d`                  | x_t, d_t; with `_new`: x_{t+1}, d_{t+1}     |
| `g_tilde`, `g`            | g~_t, g_{t+1}                               |
| `a`, `eta`                | a_{t+1}, eta_t; with `_new`: the next ones  |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus.jax.options import Options
from stormplus.jax.trees import Layout, PyTree, estimator_dtype, sums_dtype
from stormplus.rules import Sum, Sums


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
            entry a leaf or group.
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


class MeasuredState(NamedTuple):
    """The state of a rule in measured units: the template's, and what has been measured."""

    storm: StormState
    units: PyTree


class Units(Protocol):
    """What a rule sees beside the sums: numbers measured where the gradient was taken."""

    def init(self, layout: Layout) -> PyTree:
        """What is carried from call to call, a tree of arrays."""

    def measure(
        self, units: PyTree, layout: Layout, x_new: list[jax.Array], g_sq: jax.Array, t: jax.Array
    ) -> tuple[PyTree, tuple[Any, ...]]:
        """The tree after this sample, and the rule's further arguments."""


def transformation(
    rule: Callable[..., tuple[Sums, Any, Any]], options: Options, units: Units | None = None
) -> optax.GradientTransformationExtraArgs:
    def init(params: PyTree) -> StormState | MeasuredState:
        layout = options.layout(params)
        d = [jnp.zeros_like(x_i, dtype=estimator_dtype(x_i)) for x_i in layout.x]

        # Each call makes an array of its own: a donated buffer must not occur twice.
        def count() -> jax.Array:
            return jnp.zeros((), jnp.int32)

        def scalar() -> jax.Array:
            return jnp.zeros(layout.shape, sums_dtype())

        storm = StormState(
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
        return storm if units is None else MeasuredState(storm, units.init(layout))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        grad_fn: Callable[[PyTree], PyTree] | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, StormState | MeasuredState]:
        del extra_args  # meant for other transformations
        if params is None or not callable(grad_fn):
            raise TypeError(_HOW_TO_CALL.format(params=_given(params), grad_fn=_given(grad_fn)))
        state, measured = (state, None) if units is None else state
        layout = options.layout(params)
        x, d = layout.x, layout.estimator(state.estimator)
        handed_over = layout.gradient(updates, "the first argument of update()")
        g_tilde = options.gradient(layout, handed_over, x)

        # Beyond the paper: gradients that are not finite, or too large for the sums' dtype.
        # The first one: nothing happens. The second: the move stands, for it depends on no
        # gradient of this sample; the sums do not, and the estimator starts anew.
        g_tilde_sq = layout.square_norm(g_tilde, options.norm)
        first = jnp.isfinite(g_tilde_sq).all()

        # Without an estimator a = 1 and eta = 0: x stays and d <- g, as in Alg. 1, line 1.
        a = jnp.where(state.started, state.gain, 1)
        eta = jnp.where(state.started & first, state.step_size, 0)
        lr = options.lr(state.moves) if callable(options.lr) else options.lr
        # Beyond the paper: decoupled weight decay, which no gradient and no norm contains.
        direction = [d_i + decay_i for d_i, decay_i in zip(d, options.decay(x, decoupled=True))]
        move = layout.with_zeros(
            (-eta_i * direction_i).astype(x_i.dtype)
            for eta_i, direction_i, x_i in zip(layout.each(lr * eta), direction, x)
        )
        moved = optax.apply_updates(params, move)  # Alg. 1, line 4
        x_new = layout.select(jax.tree.leaves(moved))
        returned = layout.gradient(grad_fn(moved), "what grad_fn returns")
        g = options.gradient(layout, returned, x_new)  # Alg. 1, line 5
        d_new = [
            g_i + (1 - a_i) * (d_i - g_tilde_i)  # Alg. 1, line 6
            for g_i, a_i, d_i, g_tilde_i in zip(g, layout.each(a), d, g_tilde)
        ]
        d_new = [jnp.where(first, new, old) for new, old in zip(d_new, d)]

        g_sq, d_sq = (layout.square_norm(v, options.norm) for v in (g, d_new))
        sums = Sums(state.sum_g_sq, state.sum_d_sq_over_a)
        t = (state.step + 1).astype(sums_dtype())
        measured_new, scalars = measured, ()
        if units is not None:
            measured_new, scalars = units.measure(measured, layout, x_new, g_sq, t)
        sums_new, a_new, eta_new = rule(sums, g_sq, d_sq, t, *scalars)  # Alg. 1, line 3

        second = all_finite((sums_new, a_new, eta_new))
        accepted = first & second

        def kept(new: Any, old: jax.Array) -> jax.Array:
            return jnp.where(accepted, new, old).astype(old.dtype)

        def difference() -> jax.Array:
            """At a start both were taken at one point, and must be one gradient."""
            apart = [new - old for new, old in zip(returned, handed_over)]
            off, size = (layout.square_norm(v, "raw").sum() for v in (apart, handed_over))
            return jnp.sqrt(off / jnp.where(size == 0, 1, size)).astype(state.mismatch.dtype)

        mismatch = jax.lax.cond(state.started, lambda: state.mismatch, difference)
        new = StormState(
            step=state.step + accepted,
            moves=state.moves + (first & state.started),
            started=jnp.where(first, second, state.started),
            skipped=state.skipped + ~first,
            restarts=state.restarts + (first & ~second),
            mismatch=kept(mismatch, state.mismatch),
            gain=kept(a_new, state.gain),
            step_size=kept(eta_new, state.step_size),
            sum_g_sq=jax.tree.map(kept, sums_new.sum_g_sq, state.sum_g_sq),
            sum_d_sq_over_a=jax.tree.map(kept, sums_new.sum_d_sq_over_a, state.sum_d_sq_over_a),
            estimator=layout.with_holes([_finite(d_i) for d_i in d_new]),
        )
        rest = jax.tree.map(kept, measured_new, measured)
        return move, new if units is None else MeasuredState(new, rest)

    return optax.GradientTransformationExtraArgs(init, update)


def verify(state: PyTree, *, rtol: float = 1e-2) -> None:
    """Raise if the two evaluations of the first step were not of one sample.

    The first call evaluates `grad_fn` where the gradient handed over was evaluated, so the
    two must agree. They do not when `grad_fn` draws a batch or a key of its own, when
    something in an `optax.chain` processed the one gradient and not the other, or under
    `optax.MultiSteps`. Call it once, outside `jit`, after the first update.

    Args:
        state: The optimizer's state, also inside the state of a chain or a wrapper.
        rtol: The relative difference allowed for rounding.

    Raises:
        ValueError: There is no `StormState` in `state`, or no step has been made.
        RuntimeError: The gradients differ.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, StormState))
    found = [node for node in nodes if isinstance(node, StormState)]
    if not found or any(int(jnp.min(s.step)) == 0 for s in found):
        raise ValueError(
            "verify needs the state after the first update: got "
            + (f"step {found[0].step}" if found else f"no StormState in {type(state).__name__}")
        )
    for storm_state in found:
        mismatch = float(jnp.max(storm_state.mismatch))
        if mismatch > rtol:
            raise RuntimeError(
                f"grad_fn and the gradient handed to update() differ at one point, by "
                f"{mismatch:.2g} relatively. Both must be of one sample (close over the batch and "
                "the key), and nothing may process one of them alone: use gradient_transform= "
                "for clipping, accumulate() for micro-batches"
            )


_HOW_TO_CALL = (
    "update needs the parameters and grad_fn, the gradient as a function of the parameters on "
    "this call's sample: `grad_fn = lambda p: jax.grad(loss)(p, batch)`, then "
    "`tx.update(grad_fn(params), state, params, grad_fn=grad_fn)`; got {params} as params and "
    "{grad_fn} as grad_fn"
)


def _given(value: Any) -> str:
    return repr(value) if value is None else f"a {type(value).__name__}"


def _finite(leaf: jax.Array) -> jax.Array:
    # After a gradient that is not finite the estimator is not read before it is written.
    # It is made finite all the same: no state has a NaN in it. Elementwise, because a
    # test of the whole would be one more pass over memory.
    return jnp.where(jnp.isfinite(leaf), leaf, 0)


def all_finite(tree: PyTree) -> jax.Array:
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all()
