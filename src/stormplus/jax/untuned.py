"""`untuned`: its update, and the average of its iterates.

| here         | meaning                                                                     |
|--------------|-----------------------------------------------------------------------------|
| `p`, `y`     | the parameters, as stored and in full precision                             |
| `e`          | z - x, the fast iterate minus the average                                   |
| `s`, `u`     | the root mean square of a coordinate's gradients, and g / s                 |
| `w`, `c`     | the weight of g^2 in s^2, and of z in the average                           |
| `eta`        | how far a coordinate with |g| = s moves; with the leaf's factor, `alpha`     |
| `b`          | `INTERPOLATION`: y = (1 - b) z + b x                                        |

Neither z nor x is stored: z = y + b e and x = y - (1 - b) e.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped, unused-ignore]

from stormplus import untuned_rule
from stormplus.jax._options import Number, NumberOrSchedule, Options, check_number, may_decay
from stormplus.jax._trees import (
    OptimizedLeaves,
    PyTree,
    TreeOrFunction,
    accumulator_dtype,
    broadcast_prefix,
    find_states,
    is_masked,
    root_mean_squares,
    safe_increment,
    square_root,
    stack_equal_sizes,
    sums_of_squares,
    widen,
)
from stormplus.jax._untuned_leaf import (
    UntunedCoefficients,
    coordinates,
    full_precision,
    normalize,
    step_leaf,
)
from stormplus.rules import Sum
from stormplus.untuned_rule import INITIAL_WALK, INTERPOLATION, UntunedScalars

P = ParamSpec("P")
R = TypeVar("R")


class UntunedState(NamedTuple):
    """The state of `untuned`.

    Attributes:
        step: t, the number of gradients used, and the argument of a schedule.
        skipped: Calls without effect, because the gradient was not finite.
        distance: r of the next step. This and the next five have one entry per leaf.
        ceiling: R, the leaf's scale. r exceeds it only while the steps agree.
        step_size: eta of the last step.
        effective_steps: The steps so far, each counted as the part of the leaf that it moved.
        walk: The squared distance, in units of R^2, of a random walk with the same step sizes.
        evidence: How well the steps agree: the sum of A squared (`untuned_rule`)
            over the effective steps.
        z_minus_x: The fast iterate minus the average, like the parameters but float32 or wider,
            or with `state_dtype`.
        grad_rms: s, with the dtype of `z_minus_x`.
        initial_sample: z_1 on the coordinates that are measured, all leaves in one array.
        master: y in float32 for leaves in half precision; `optax.MaskedNode` for others.
    """

    step: jax.Array
    skipped: jax.Array
    distance: jax.Array
    ceiling: jax.Array
    step_size: jax.Array
    effective_steps: Sum
    walk: jax.Array
    evidence: jax.Array
    z_minus_x: PyTree
    grad_rms: PyTree
    initial_sample: jax.Array
    master: PyTree


def _without_lr(make: Callable[P, R]) -> Callable[P, R]:
    """Raise if a learning rate is passed."""

    # A decorator: `optax.inject_hyperparams` reads the signature, which must not have `**kwargs`.
    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        rates = [f"{k}={kwargs[k]!r}" for k in ("lr", "learning_rate") if k in kwargs]
        if args or rates:
            raise TypeError(
                "untuned has no learning rate: every leaf finds its step size from its own scale "
                "and from how far it has come. Leave it out; factor= is for a schedule, or to "
                f"slow some leaves down; got {', '.join([*map(repr, args), *rates])}"
            )
        return make(*args, **kwargs)

    return checked


@_without_lr
def untuned(
    *,
    weight_decay: Number | PyTree = 0.0,
    maximize: bool = False,
    factor: NumberOrSchedule | PyTree = 1.0,
    state_dtype: Any = None,
    mask: TreeOrFunction = None,
    gradient_transform: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Nothing to tune, one gradient per step, Adam's memory.

    Beyond the paper: it combines the distance of DoG, the normalization of RMSprop, the
    interpolation of Schedule-Free and an average; it does not use STORM+'s estimator, which
    needs a second gradient. Every leaf has a distance r with a ceiling R. With g the gradient,
    in each coordinate:

        s^2  <- mean of g^2 over about the last third of the run
        z    <- z - clip(eta g / s, -r, r)                              the fast iterate
        x    <- mean of z over about the last tenth of the run          the average
        y     = 0.1 z + 0.9 x                                           the parameters
        r    <- min(max(r, k RMS of z - z_1), R sqrt(1 + A))            starts at R / 200

    R is the leaf's root mean square at the start, or 1 / sqrt(inputs per output) if that is
    larger. k is 1, and up to 4 while the steps of the leaf agree. A is 0 unless the steps so far
    agree in every matrix. eta is r / sqrt(t), but at most (1 + E) R / 60, where E is the sum of
    A^2 over the steps so far. A leaf has the shape (..., inputs, outputs), as JAX's layers have it.
    See docs/untuned-rule.md.

    This is an ordinary transformation, `tx.update(grads, state, params)`; in a chain it must be
    the last. Gradients are evaluated at y; `averaged(state, params)` is what to validate and to
    save. The state is an `UntunedState`, with two buffers of the size of the parameters, and a
    float32 copy of leaves in half precision. A gradient that is not finite only increments
    `skipped`.

    Args:
        weight_decay: Decoupled, as AdamW's: each step also multiplies z by
            1 - weight_decay * eta / (R sqrt(inputs per output)), so that all leaves decay alike. A
            number, or a tree of numbers like the parameters or a prefix of their tree.
        maximize: Ascend: the gradients change sign, the weight decay does not.
        factor: Multiplies the steps: a number, or a schedule, which is a function of the number
            of previous moves; or a tree of these, like the parameters or a prefix of their tree.
            Prefer it to `optax.partition`, where each part decides separately whether steps
            agree.
        state_dtype: jnp.bfloat16 stores the two buffers in 16 bits with stochastic rounding:
            half the memory. None: as the parameters, but at least float32.
        mask: As in `storm_plus`.
        gradient_transform: As in `storm_plus`; a chain does the same.
    """
    _check_arguments(factor, weight_decay, state_dtype)
    options = Options(maximize=maximize, gradient_transform=gradient_transform)
    decays = any(may_decay(rate) for rate in jax.tree.leaves(weight_decay))

    def init(params: PyTree) -> UntunedState:
        return _initial_state(OptimizedLeaves(params, mask), state_dtype)

    def update(
        updates: PyTree, state: UntunedState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, UntunedState]:
        del extra_args  # meant for other transformations
        if params is None:
            raise TypeError(
                "update needs the parameters, to measure how far they have come: "
                "`tx.update(grads, state, params)`; got None as params"
            )
        optimized = OptimizedLeaves(params, mask)
        e, s = optimized.buffers(state.z_minus_x), optimized.buffers(state.grad_rms)
        p, master = optimized.leaves, optimized.entries(state.master)
        passed = optimized.gradient(updates, "the first argument of update()")
        g = options.objective_gradient(optimized, passed, p)

        # Scalars: one entry per leaf
        scalars = UntunedScalars(*(getattr(state, name) for name in UntunedScalars._fields))
        eta = untuned_rule.next_step_size(scalars, jnp)
        scale = _per_leaf(factor, optimized, params, state.step)
        alpha = scale * eta
        decay = None
        if decays:
            rate = _per_leaf(weight_decay, optimized, params, state.step)
            natural = _natural_scales(optimized)
            decay = untuned_rule.decay_fraction(rate, alpha, natural, scalars.ceiling, jnp)
        t = state.step.astype(eta.dtype) + 1
        coefficients = UntunedCoefficients(
            alpha=alpha,
            max_move=scale * scalars.distance,
            decay=decay,
            grad_weight=untuned_rule.grad_weight(t),
            average_weight=untuned_rule.average_weight(t),
        )

        # Each leaf
        normalized = [normalize(g_i, s_i, coefficients.grad_weight) for g_i, s_i in zip(g, s)]
        sizes = np.array([max(p_i.size, 1) for p_i in p])
        mean_square = sums_of_squares([u for _, u in normalized]) / sizes
        # Beyond the paper: a non-finite gradient has no effect. `mean_square` is finite iff every
        # gradient is; `eta` catches parameters that were not finite at the start.
        finite = jnp.isfinite(jnp.sum(mean_square + 0 * eta))
        shared = {"step": safe_increment(state.step), "finite": finite, "state_dtype": state_dtype}
        new = [
            step_leaf(p_i, u, of_leaf, master=master_i, e=e_i, s=s_i, s_new=s_new, **shared)
            for p_i, (s_new, u), of_leaf, master_i, e_i, s_i in zip(
                p, normalized, coefficients.of_each_leaf(), master, e, s
            )
        ]
        param_updates = optimized.tree((leaf.update for leaf in new), fill=jnp.zeros_like)

        def if_finite(value: Any, old: jax.Array) -> jax.Array:
            return jnp.where(finite, value, old).astype(old.dtype)

        if p:  # the rule compares leaves: there must be one
            # From the returned update: XLA would have to copy what it is computed from.
            p_new = optimized.select(jax.tree.leaves(optax.apply_updates(params, param_updates)))
            new_e = [leaf.z_minus_x for leaf in new]
            y = [p_i if is_masked(leaf.master) else leaf.master for p_i, leaf in zip(p_new, new)]
            after = untuned_rule.after_step(
                scalars,
                step_size=eta,
                alpha=alpha,
                mean_square=mean_square,
                displacement=_displacement(y, new_e, state),
                eligible=np.array(
                    untuned_rule.eligible_tensors([p_i.ndim if p_i.size else 0 for p_i in p])
                ),
                xp=jnp,
            )
            # Computed from the value, to be on its devices even if it is a constant 0: otherwise
            # the update would be compiled once more.
            lost = after.effective_steps.lost + 0 * after.effective_steps.value
            after = after._replace(effective_steps=after.effective_steps._replace(lost=lost))
            scalars = jax.tree.map(if_finite, after, scalars)
        return param_updates, state._replace(
            **scalars._replace(step=safe_increment(state.step, finite))._asdict(),
            skipped=safe_increment(state.skipped, ~finite),
            z_minus_x=optimized.tree(leaf.z_minus_x for leaf in new),
            grad_rms=optimized.tree(leaf.grad_rms for leaf in new),
            master=optimized.tree(leaf.master for leaf in new),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_arguments(factor: Any, weight_decay: Any, state_dtype: Any) -> None:
    if state_dtype is not None and state_dtype != jnp.bfloat16:
        raise ValueError(f"state_dtype must be jnp.bfloat16 or None, got {state_dtype!r}")
    for name, tree in (("factor", factor), ("weight_decay", weight_decay)):
        for value in jax.tree.leaves(tree):
            check_number(name, value)


def _initial_state(optimized: OptimizedLeaves, state_dtype: Any) -> UntunedState:
    y = widen(optimized.leaves)
    masters = [
        y_i if y_i.dtype != p.dtype else optax.MaskedNode() for p, y_i in zip(optimized.leaves, y)
    ]

    # A new array per field: a buffer that occurs twice cannot be donated.
    def zeros() -> jax.Array:
        return jnp.zeros(len(y), accumulator_dtype())

    def buffer() -> PyTree:
        return optimized.tree(jnp.zeros_like(y_i, dtype=state_dtype or y_i.dtype) for y_i in y)

    z_1 = [rows.reshape(-1) for _, rows in _coordinates_by_size(y)]
    ceiling = untuned_rule.distance_ceiling(root_mean_squares(y), _natural_scales(optimized), jnp)
    return UntunedState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        distance=untuned_rule.initial_distance(ceiling),
        ceiling=ceiling,
        step_size=zeros(),
        effective_steps=Sum(zeros(), zeros()),
        walk=zeros() + INITIAL_WALK,
        evidence=zeros(),
        z_minus_x=buffer(),
        grad_rms=buffer(),
        # One array and not a tree: it has neither the shapes nor the sharding of the parameters.
        initial_sample=jnp.concatenate(z_1) if z_1 else jnp.zeros(0),
        master=optimized.tree(masters),
    )


def averaged(state: PyTree, params: PyTree) -> PyTree:
    """Return the averaged parameters, to validate or to save. Training continues from `params`.

    Args:
        state: The state of `untuned`, also inside the state of a chain or a wrapper.
        params: The parameters that belong to this state; the average is computed from both. With
            Flax NNX, `averaged(optimizer.opt_state, nnx.state(model, nnx.Param))`.

    Returns:
        A tree like `params`. Before the first step it equals `params`; leaves that are not
        optimized are those of `params`.

    Raises:
        ValueError: There is no `UntunedState` in `state`, or `params` do not match it.
    """
    states = find_states(UntunedState, state)
    if not states:
        raise ValueError(
            "averaged needs a state of untuned, also within another: "
            f"got none in {type(state).__name__}"
        )
    leaves, structure = jax.tree.flatten(params)
    for found in states:
        # Compared by leaves and not by nodes: Flax NNX wraps the arrays of the state differently.
        e, master = (
            jax.tree.leaves(tree, is_leaf=is_masked) for tree in (found.z_minus_x, found.master)
        )
        if len(e) != len(leaves) or any(
            not is_masked(e_i) and e_i.shape != jnp.shape(p) for e_i, p in zip(e, leaves)
        ):
            raise ValueError(
                "params do not match the structure of the optimizer state (within optax.flatten, "
                f"params are one vector): shapes {list(map(jnp.shape, leaves))}"
            )
        leaves = list(map(_averaged_leaf, e, master, leaves))
    return jax.tree.unflatten(structure, leaves)


def _averaged_leaf(e: Any, master: Any, param: Any) -> Any:
    if is_masked(e):
        return param
    p = jnp.asarray(param)
    y = full_precision(p, master)
    return (y - (1 - INTERPOLATION) * e.astype(y.dtype)).astype(p.dtype)


# -- numbers of each leaf --------------------------------------------------------------------


def _per_leaf(value: Any, optimized: OptimizedLeaves, params: PyTree, moves: jax.Array) -> Any:
    """Return a number for all leaves or an array with one per leaf, with schedules evaluated."""
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):  # a tree may be callable too
        return value(moves) if callable(value) else value
    each = optimized.select(broadcast_prefix(value, params))
    return jnp.array([v(moves) if callable(v) else v for v in each], accumulator_dtype())


def _natural_scales(optimized: OptimizedLeaves) -> jax.Array:
    leaves = optimized.leaves
    inputs = [x.size // max(x.shape[-1], 1) if x.ndim > 1 else x.size for x in leaves]
    return jnp.array([untuned_rule.natural_scale(n) for n in inputs], accumulator_dtype())


# -- the displacement ------------------------------------------------------------------------


def _displacement(y: Sequence[jax.Array], e: Sequence[jax.Array], state: UntunedState) -> jax.Array:
    """Return the root mean square of z - z_1 over each leaf's measured coordinates."""
    # In units of R the squares neither overflow nor underflow; R itself cancels.
    scale = jax.lax.stop_gradient(state.ceiling)
    squares: list[jax.Array] = []
    order: list[int] = []
    start = 0
    for (which, y_rows), (_, e_rows) in zip(_coordinates_by_size(y), _coordinates_by_size(e)):
        z = y_rows + INTERPOLATION * e_rows.astype(y_rows.dtype)
        z_1 = state.initial_sample[start : start + z.size].reshape(z.shape)
        start += z.size
        moved = (z - z_1) / scale[np.array(which), None]
        squares.append(jnp.sum(jnp.square(moved), axis=1) / max(z.shape[1], 1))
        order += which
    return scale * square_root(jnp.concatenate(squares)[np.argsort(order)])


def _coordinates_by_size(leaves: Sequence[jax.Array]) -> list[tuple[list[int], jax.Array]]:
    return stack_equal_sizes([coordinates(leaf) for leaf in leaves])
