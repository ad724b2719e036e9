"""`untuned`: its whole update, and the average of its iterates.

| here                      | meaning                                                        |
|---------------------------|----------------------------------------------------------------|
| `x`, `y`                  | the parameters; the same in full precision                     |
| `e`, `s`, `r`             | the lead z - x, the unit, the distance; with `_new`: the next  |
| `w`, `c`                  | the weights of the t-th gradient in s^2, of z in the average   |
| `eta`                     | the step in units of s                                         |
| `b`                       | how far y stands from z towards the average: `INTERPOLATION`   |

Neither z nor the average is stored: docs/untuned.md and torch/untuned.py have the algebra.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped, unused-ignore]
from jax.sharding import NamedSharding, PartitionSpec

from stormplus import rules
from stormplus.jax.core.options import Number, NumberOrSchedule, Options, check_number
from stormplus.jax.core.trees import (
    Layout,
    PyTree,
    TreeOrFunction,
    all_finite,
    counted,
    estimator_dtype,
    is_hole,
    per_leaf,
    sums_dtype,
    widened,
)
from stormplus.rules import INTERPOLATION, Sum
from stormplus.versions import barrier, explicit_mesh

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class UntunedState(NamedTuple):
    """What is carried from call to call.

    Attributes:
        step: t, the gradients used, and the moves made: what a schedule is evaluated at.
        skipped: Calls without effect, because the gradient was not finite.
        distance: r of the next step. This and the next five have one entry for each leaf.
        ceiling: R, which r never exceeds.
        step_size: eta of the last step.
        counted: How many steps eta has seen: one that moved a part of the leaf counts as that part.
        walk: The square of how far the steps would have led at random, in units of the ceiling.
        evidence: That the steps agree in all matrices: the sum of the square of how much.
        lead: z - x, the fast iterate less the average, like the parameters but float32 or wider,
            or of `state_dtype`.
        unit: s, like the lead.
        origin: z_1, a sample of the coordinates of all leaves, one after another.
        master: y in float32 where the parameters are narrower, and nothing elsewhere.
    """

    step: jax.Array
    skipped: jax.Array
    distance: jax.Array
    ceiling: jax.Array
    step_size: jax.Array
    counted: Sum
    walk: jax.Array
    evidence: jax.Array
    lead: PyTree
    unit: PyTree
    origin: jax.Array
    master: PyTree


def _without_lr(make: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    # `optax.inject_hyperparams` reads the signature: no `**others` may be in it.
    @functools.wraps(make)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
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

    Beyond the paper: it is made of DoG's distance, RMSprop's unit, Schedule-Free's interpolation
    and an average; STORM+'s estimator, with its second gradient, is not in it. Every leaf has a
    distance r and a ceiling R for it; with g the gradient, in each coordinate:

        s^2  <- mean of g^2 over about the last third of the run        the unit
        z    <- z - (r / sqrt(t)) g / s                                 the fast iterate
        x    <- mean of z over about the last tenth of the run          the average
        y     = 0.1 z + 0.9 x                                           the parameters
        r    <- min(max(r, RMS of z - z_1), R)                          from a small part of R on

    R is the leaf's root mean square at the start, or one over the root of its inputs if that is
    larger. No step is larger than the first, R / 60, unless the steps so far agree in every matrix.
    A leaf is taken as (inputs, outputs), as JAX's layers have it: the last axis counts the
    outputs. docs/untuned.md has the whole rule and the study behind it.

    It is an ordinary transformation, `tx.update(grads, state, params)`, to be put last in a
    chain. The gradients are taken at y; `averaged(state, params)` is what to validate and to
    keep. The state is an `UntunedState`, with two buffers of the size of the parameters, and a
    third, in float32, for leaves in half precision. A gradient that is not finite has no effect
    but in `skipped`.

    There is no learning rate.

    Args:
        weight_decay: Decoupled, as AdamW's with the step size for its lr: a step takes this
            times the step size off every weight. Leaves that start above their natural scale
            have larger steps, and the same decay. A number, or a tree of them, like the
            parameters or a prefix of that.
        maximize: Ascend: the gradients change sign, the weight decay does not.
        factor: Multiplies the steps: a number, or a schedule of the moves made before (0 at the
            first); or a tree of these, like the parameters or a prefix of that. With
            `optax.partition` each part would judge for itself whether steps agree.
        state_dtype: jnp.bfloat16 keeps the two buffers in 16 bits, rounded at random so that
            small changes count in the mean: half the memory. None: as the parameters, float32 at
            least.
        mask: As in `storm_plus`.
        gradient_transform: As in `storm_plus`; a chain does the same.
    """
    _check_numbers(factor, weight_decay)
    if state_dtype is not None and state_dtype != jnp.bfloat16:
        raise ValueError(f"state_dtype must be jnp.bfloat16 or None, got {state_dtype!r}")
    options = Options(
        lr=1.0,
        weight_decay=0.0,
        decoupled_weight_decay=True,
        maximize=maximize,
        scope="tensor",  # every leaf has its own numbers
        groups=None,
        mask=mask,
        gradient_transform=gradient_transform,
    )

    def init(params: PyTree) -> UntunedState:
        return _begin(options.layout(params), state_dtype)

    def update(
        updates: PyTree, state: UntunedState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, UntunedState]:
        del extra_args  # meant for other transformations
        if params is None:
            raise TypeError(
                "update needs the parameters, to measure how far they have come: "
                "`tx.update(grads, state, params)`; got None as params"
            )
        layout = options.layout(params)
        x = layout.x
        e = [_like(e_i, x_i) for e_i, x_i in zip(layout.buffer(state.lead), x)]
        s = [_like(s_i, x_i) for s_i, x_i in zip(jax.tree.leaves(state.unit), x)]
        y = _full(x, jax.tree.leaves(state.master))
        g = options.gradient(layout, layout.gradient(updates, "the first argument of update()"), x)

        t_int = counted(state.step)
        t = t_int.astype(sums_dtype())
        r, ceiling = state.distance, state.ceiling
        scale = _of_leaves("factor", factor, layout, params, state.step)
        eta = rules.untuned_step_size(r, state.counted.total, ceiling, state.evidence)
        w = rules.unit_weight(t)
        u = [_ratio(g_i, _root_mean_square(s_i, g_i, w)) for s_i, g_i in zip(s, g)]
        mean_square = layout.square_norm(u, "mean")

        # Beyond the paper: a gradient that is not finite has no effect. Then u is not finite
        # either, and else it is. Nor has a step from parameters that are not: r tells.
        finite = all_finite((mean_square, eta))

        # Two passes, of which the second begins anew: what both would share, the compiler would
        # keep, in buffers of the size of the parameters.
        g, s, finite = _barrier((g, s, finite))
        s_new = [jnp.where(finite, _root_mean_square(s_i, g_i, w), s_i) for s_i, g_i in zip(s, g)]
        u = [_ratio(g_i, s_i) for g_i, s_i in zip(g, s_new)]
        step = [
            jnp.clip(alpha_i * u_i, -limit_i, limit_i)
            for alpha_i, limit_i, u_i in zip(layout.each(scale * eta), layout.each(scale * r), u)
        ]
        if _decays(weight_decay):
            rate = _of_leaves("weight_decay", weight_decay, layout, params, state.step)
            decay = rules.decay_factor(rate, scale * eta, _natural(layout), ceiling)
            step = [
                step_i + decay_i * (y_i + INTERPOLATION * e_i)  # of z
                for step_i, decay_i, y_i, e_i in zip(step, layout.each(decay), y, e)
            ]

        # z <- z - step, x <- x + c (z - x), y <- (1 - b) z + b x, in terms of y and e = z - x.
        b, c = INTERPOLATION, rules.average_weight(t)
        m = [e_i - step_i for e_i, step_i in zip(e, step)]
        move = [
            (c + (1 - b) * (1 - c)).astype(m_i.dtype) * m_i - (1 - b) * e_i
            for m_i, e_i in zip(m, e)
        ]
        e_new = [(1 - c).astype(m_i.dtype) * m_i for m_i in m]
        if state_dtype is not None:
            e_new = [_rounded_at_random(e_i, t_int, 0) for e_i in e_new]
            s_new = [_rounded_at_random(s_i, t_int, 1) for s_i in s_new]

        def kept(new: Any, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old).astype(old.dtype)

        lead = layout.with_holes(e_new)
        master = _masters(layout, [y_i + move_i for y_i, move_i in zip(y, move)])
        lead, master = jax.tree.map(kept, (lead, master), (state.lead, state.master))
        seen = layout.with_zeros(
            jnp.where(finite, move_i, 0).astype(x_i.dtype)
            for x_i, move_i in zip(x, _seen_moves(x, move, jax.tree.leaves(master)))
        )

        # Of what is handed back, not of what it is made from: that would have to be copied.
        x_new = layout.select(jax.tree.leaves(optax.apply_updates(params, seen)))
        z = [
            _sample(y_i) + b * _sample(e_i).astype(y_i.dtype)
            for y_i, e_i in zip(_full(x_new, jax.tree.leaves(master)), jax.tree.leaves(lead))
        ]
        moved = layout.rms([z_i - z_1_i for z_i, z_1_i in zip(z, _split(state.origin, z))])
        new = _taken_in(state, layout, eta, scale * eta, mean_square, moved)._replace(step=t_int)
        return seen, jax.tree.map(kept, new, state)._replace(
            skipped=counted(state.skipped, ~finite),
            lead=lead,
            unit=layout.with_holes(s_new),
            master=master,
        )

    return optax.GradientTransformationExtraArgs(init, update)


_barrier = barrier()


def _begin(layout: Layout, state_dtype: Any) -> UntunedState:
    y = widened(layout.x)

    # Each call makes arrays of their own: a donated buffer must not occur twice.
    def numbers() -> jax.Array:
        return jnp.zeros(layout.shape, sums_dtype())

    def buffer() -> PyTree:
        return layout.with_holes(jnp.zeros_like(y_i, dtype=state_dtype or y_i.dtype) for y_i in y)

    ceiling = rules.distance_ceiling(layout.rms(y), _natural(layout))
    return UntunedState(
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        distance=rules.first_distance(ceiling),
        ceiling=ceiling,
        step_size=numbers(),
        counted=Sum(numbers(), numbers()),
        walk=numbers() + rules.FIRST_WALK,
        evidence=numbers(),
        lead=buffer(),
        unit=buffer(),
        origin=_joined([_sample(y_i) for y_i in y]),
        master=_masters(layout, y),
    )


def _check_numbers(factor: Any, weight_decay: Any) -> None:
    for name, value in (("factor", factor), ("weight_decay", weight_decay)):
        if value is None:  # a tree without leaves
            raise TypeError(f"{name} must be a number or a tree of numbers, got None")
    for value in jax.tree.leaves(factor):
        if not callable(value):
            check_number("factor", value, "1.0 is none; a schedule is a function")
    for value in jax.tree.leaves(weight_decay):
        check_number("weight_decay", value, "0.0 is none")


def _of_leaves(name: str, value: Any, layout: Layout, params: PyTree, moves: jax.Array) -> Any:
    """A number, or one for each leaf; schedules as they are after so many moves."""
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):  # a tree may be callable too
        return value(moves) if callable(value) else value
    each = layout.select(per_leaf(name, value, params))
    numbers = [jnp.asarray(v(moves) if callable(v) else v, sums_dtype()) for v in each]
    return jnp.stack(numbers) if numbers else jnp.zeros(0, sums_dtype())


def _decays(weight_decay: Any) -> bool:
    # An array may be traced, and is not looked at.
    return any(isinstance(v, jax.Array) or v != 0 for v in jax.tree.leaves(weight_decay))


def _taken_in(  # noqa: PLR0917
    state: UntunedState,
    layout: Layout,
    eta: jax.Array,
    alpha: jax.Array,
    mean_square: jax.Array,
    moved: jax.Array,
) -> UntunedState:
    """The numbers after a step of size alpha: eta, with the factor on it."""
    counts = rules.counted_step(mean_square)
    counted = state.counted.plus(counts)
    walk = state.walk + (alpha / state.ceiling) ** 2 * mean_square
    asked = np.array(rules.asked([x.ndim if x.size else 0 for x in layout.x]), bool)
    least = rules.least_agreement(moved / state.ceiling, walk, asked)
    return state._replace(
        distance=rules.next_distance(state.distance, moved, state.ceiling),
        step_size=eta,
        counted=counted,
        walk=walk,
        evidence=state.evidence + counts * least**2,
    )


def averaged(state: PyTree, params: PyTree) -> PyTree:
    """The averaged parameters, to validate or to keep; training goes on from `params`.

    Args:
        state: The state of `untuned`, also inside the state of a chain or a wrapper.
        params: The parameters that belong to this state: the average is told from them.

    Returns:
        A tree like `params`. Before the first step it is the parameters; leaves that are not
        optimised are theirs.

    Raises:
        ValueError: There is no such state in `state`.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, UntunedState))
    found = [node for node in nodes if isinstance(node, UntunedState)]
    if not found:
        raise ValueError(
            "averaged needs a state of untuned, also within another: "
            f"got none in {type(state).__name__}"
        )
    for one in found:
        try:
            params = jax.tree.map(_averaged_leaf, one.lead, one.master, params, is_leaf=is_hole)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "the state of untuned is not of these parameters: hand over those that it was "
                "made for (within optax.flatten, one vector)"
            ) from error
    return params


def _averaged_leaf(e: Any, master: Any, p: Any) -> Any:
    if is_hole(e):
        return p
    x = jnp.asarray(p)
    (y,) = _full([x], [] if is_hole(master) else [master])
    return (y - (1 - INTERPOLATION) * e.astype(y.dtype)).astype(x.dtype)


def _natural(layout: Layout) -> jax.Array:
    """The natural scale of each leaf."""
    inputs = [x.size // max(x.shape[-1], 1) if x.ndim > 1 else x.size for x in layout.x]
    return jnp.array([rules.natural_scale(n) for n in inputs], sums_dtype())


def _like(buffer: jax.Array, x: jax.Array) -> jax.Array:
    """As the arithmetic wants it: a buffer may be narrower."""
    return buffer.astype(estimator_dtype(x))


def _root_mean_square(s: jax.Array, g: jax.Array, w: jax.Array) -> jax.Array:
    # The root is stored, not the square: 1e-20 and 1e20 have none in float32.
    old, new = (1 - w).astype(s.dtype), w.astype(s.dtype)
    return jnp.hypot(jnp.sqrt(old) * s, jnp.sqrt(new) * g)


def _ratio(g: jax.Array, s: jax.Array) -> jax.Array:
    # 0/0 is 0: where no gradient has been, no step is made.
    return jnp.where(s == 0, 0, g / jnp.where(s == 0, 1, s))


# -- half precision --------------------------------------------------------------------------


def _narrow(x: jax.Array) -> bool:
    return estimator_dtype(x) != x.dtype


def _masters(layout: Layout, y: Sequence[jax.Array]) -> PyTree:
    """The tree of y where the parameters are too narrow to hold it, and of holes elsewhere."""
    pairs = zip(layout.x, y)
    return layout.with_holes(y_i if _narrow(x_i) else optax.MaskedNode() for x_i, y_i in pairs)


def _full(x: Sequence[jax.Array], masters: Sequence[jax.Array]) -> list[jax.Array]:
    """y: the parameters, or their masters, where those still round to them."""
    rest = iter(masters)
    y = widened(x)
    for i, x_i in enumerate(x):
        if _narrow(x_i):
            master = next(rest)
            y[i] = jnp.where(_rounded(master, x_i.dtype) == y[i], master, y[i])
    return y


def _seen_moves(
    x: Sequence[jax.Array], move: Sequence[jax.Array], masters: Sequence[jax.Array]
) -> list[jax.Array]:
    """The moves of the parameters: to what they can hold of y, where that is not y itself."""
    rest = iter(masters)
    return [
        _rounded(next(rest), x_i.dtype) - x_i.astype(move_i.dtype) if _narrow(x_i) else move_i
        for x_i, move_i in zip(x, move)
    ]


def _rounded(y: jax.Array, dtype: Any) -> jax.Array:
    """The nearest number of a narrower dtype, in y's own.

    Not by a cast there and back: a compiler may leave out such a pair.
    """
    bits = jnp.finfo(dtype)  # type: ignore[no-untyped-call, unused-ignore]
    rounded = jax.lax.reduce_precision(y, bits.nexp, bits.nmant)
    if bits.nexp >= 8:
        return rounded
    # `reduce_precision` makes zeros of subnormal numbers, which in float16 begin at 6e-5.
    grain = float(bits.smallest_subnormal)
    return jnp.where(jnp.abs(y) < float(bits.tiny), jnp.round(y / grain) * grain, rounded)


def _rounded_at_random(v: jax.Array, t: jax.Array, which: int) -> jax.Array:
    """V in bfloat16, up or down with the odds that make it right in the mean.

    As in torch/untuned.py: the odds are drawn from the step and the place of the element, and from
    no stream, so that a run that is resumed goes on as it would have.
    """
    key = _mixed(2 * t.astype(jnp.uint32) + jnp.uint32(which))
    odds = _mixed(_mixed(_places(v)) ^ key) & jnp.uint32(0xFFFF)
    v = v.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(v, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + odds) & jnp.uint32(0xFFFF0000), jnp.float32)
    # Exactly `rounded`, with the derivative of v.
    return (v + jax.lax.stop_gradient(rounded - v)).astype(jnp.bfloat16)


def _places(v: jax.Array) -> jax.Array:
    """The place of each element in the flattened leaf, modulo 2^32."""
    places = jnp.zeros(v.shape, jnp.uint32)
    for axis in range(v.ndim):
        below = int(np.prod(v.shape[axis + 1 :], dtype=object)) % 2**32
        places += jnp.uint32(below) * jax.lax.broadcasted_iota(jnp.uint32, v.shape, axis)
    return places


def _mixed(n: jax.Array) -> jax.Array:
    """Scatter 32 bits: neighbours come out far apart."""
    n = (n ^ (n >> 16)) * jnp.uint32(0x21F0AAAD)
    n = (n ^ (n >> 15)) * jnp.uint32(0x735A2D97)
    return n ^ (n >> 15)


# -- the sample ------------------------------------------------------------------------------


_WHOLE = PartitionSpec(None)  # type: ignore[no-untyped-call, unused-ignore]


def _sample(leaf: jax.Array) -> jax.Array:
    """Every k-th coordinate of the flattened leaf, k by `rules.sample_stride`, whole everywhere.

    By their indices: a leaf that is sharded is not flattened for them.
    """
    leaf = leaf if leaf.ndim else leaf[None]
    mesh, at = explicit_mesh(leaf), leaf.at[_coordinates(leaf.shape)]
    # On a mesh with explicit axes the outcome's sharding must be said; jax 0.4 takes no such word.
    return at.get() if mesh is None else at.get(out_sharding=NamedSharding(mesh, _WHOLE))


@functools.lru_cache(maxsize=1024)
def _coordinates(shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], ...]:
    size = int(np.prod(shape, dtype=object))
    places = np.arange(0, size, rules.sample_stride(size))
    return tuple(index.astype(np.int32) for index in np.unravel_index(places, shape))


def _joined(samples: Sequence[jax.Array]) -> jax.Array:
    # One array, not a tree like the parameters: it has neither their shapes nor their sharding.
    if not samples:
        return jnp.zeros(0, sums_dtype())
    return jnp.concatenate(samples)


def _split(joined: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    ends = np.cumsum([leaf.size for leaf in like])
    return [joined[end - v.size : end].astype(v.dtype) for end, v in zip(ends.tolist(), like)]
