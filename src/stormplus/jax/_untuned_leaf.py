"""One leaf of `untuned`: its update, its rounding, and its sample of coordinates.

XLA compiles equal kernels once. These functions are therefore compiled per shape and not per leaf:
what differs between leaves of one shape comes in as an operand, never as a constant.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stormplus import untuned_rule
from stormplus.jax._trees import accumulator_dtype, is_masked, wide_dtype
from stormplus.untuned_rule import INTERPOLATION
from stormplus.versions import explicit_mesh

_REPLICATED = PartitionSpec(None)  # type: ignore[no-untyped-call, unused-ignore]


class LeafInput(NamedTuple):
    """What a step is computed from.

    Attributes:
        p: The parameter.
        master: y in float32 if `p` is in half precision, or a hole.
        g: The gradient.
        z_minus_x: e.
        grad_rms: s.
        numbers: alpha, the largest move of a coordinate, and the fraction that decays.
    """

    p: jax.Array
    master: Any
    g: jax.Array
    z_minus_x: jax.Array
    grad_rms: jax.Array
    numbers: jax.Array


class LeafStep(NamedTuple):
    """What a step returns for a leaf: its update, its new buffers, and the sum of u^2."""

    update: jax.Array
    master: Any
    z_minus_x: jax.Array
    grad_rms: jax.Array
    square_sum: jax.Array


class Shared(NamedTuple):
    """What all leaves share in a step.

    Attributes:
        step: t.
        finite: Whether all gradients are; without it the step has no effect.
        sqrt_old: The root of 1 - w, with w the weight of g^2 in s^2.
        sqrt_new: The root of w.
        keep: 1 - c, with c the weight of z in the average.
        follow: How far y follows z.
    """

    step: jax.Array
    finite: jax.Array
    sqrt_old: jax.Array
    sqrt_new: jax.Array
    keep: jax.Array
    follow: jax.Array

    @classmethod
    def at(cls, step: jax.Array, finite: jax.Array) -> Shared:
        t = step.astype(accumulator_dtype())
        w, c = untuned_rule.grad_weight(t), untuned_rule.average_weight(t)
        follow = c + (1 - INTERPOLATION) * (1 - c)
        return cls(step, finite, jnp.sqrt(1 - w), jnp.sqrt(w), 1 - c, follow)


@functools.partial(jax.jit, static_argnames=("decays", "state_dtype"))
def step_leaf(leaf: LeafInput, shared: Shared, *, decays: bool, state_dtype: Any) -> LeafStep:
    """Make one step.

    Args:
        leaf: The leaf's own arrays.
        shared: What all leaves share.
        decays: Whether there is weight decay.
        state_dtype: The dtype in which e and s are stored, or None for their own.
    """
    p, master, g, e, s, numbers = leaf
    dtype, finite = wide_dtype(p), shared.finite
    alpha, limit, decay = numbers.astype(dtype)
    sqrt_old, sqrt_new, keep, follow = (x.astype(dtype) for x in shared[2:])
    y, e_old, s_old = full_precision(p, master), e.astype(dtype), s.astype(dtype)

    s_new = jnp.where(finite, _hypot(sqrt_old * s_old, sqrt_new * g), s_old)
    u = g / jnp.where(s_new == 0, 1, s_new)  # 0 where there has been no gradient
    move = jnp.clip(alpha * u, -limit, limit)
    if decays:
        move = move + decay * (y + INTERPOLATION * e_old)

    # z <- z - move, x <- x + c (z - x), y <- (1 - b) z + b x, in terms of y and e = z - x.
    m = e_old - move
    change = jnp.where(finite, follow * m - (1 - INTERPOLATION) * e_old, 0)
    e_new = keep * m
    if state_dtype is not None:
        e_new = stochastic_round(e_new, shared.step, 0)
        s_new = stochastic_round(s_new, shared.step, 1)
    if not is_masked(master):
        master = jnp.where(finite, y + change, master)
        change = _round_to(p.dtype, master) - p.astype(dtype)
    return LeafStep(
        update=change.astype(p.dtype),
        master=master,
        z_minus_x=jnp.where(finite, e_new, e),
        grad_rms=s_new.astype(s.dtype),
        square_sum=jnp.sum(jnp.square(u.astype(accumulator_dtype()))),
    )


def _hypot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the root of a^2 + b^2 for a >= 0; in float32 1e-20 and 1e20 have no square."""
    b = jnp.abs(b)
    larger = jnp.maximum(a, b)
    ratio = jnp.minimum(a, b) / jnp.where(larger == 0, 1, larger)
    return larger * jnp.sqrt(1 + ratio * ratio)


# -- half precision --------------------------------------------------------------------------


def full_precision(p: jax.Array, master: Any) -> jax.Array:
    """Return y: the parameter, or its master where that still rounds to it."""
    y = p.astype(wide_dtype(p))
    return y if is_masked(master) else jnp.where(_round_to(p.dtype, master) == y, master, y)


def _round_to(dtype: Any, y: jax.Array) -> jax.Array:
    """Round to the nearest number of a narrower dtype, and keep the dtype of y.

    Two casts would do the same, but a compiler may remove them.
    """
    bits = jnp.finfo(dtype)  # type: ignore[no-untyped-call, unused-ignore]
    rounded = jax.lax.reduce_precision(y, bits.nexp, bits.nmant)
    if bits.nexp >= 8:
        return rounded
    # `reduce_precision` flushes subnormal numbers, which in float16 begin at 6e-5, to zero.
    grain = float(bits.smallest_subnormal)
    return jnp.where(jnp.abs(y) < float(bits.tiny), jnp.round(y / grain) * grain, rounded)


def stochastic_round(v: jax.Array, t: jax.Array, which: int) -> jax.Array:
    """Round to bfloat16, up or down with probabilities that make the mean exact.

    The random bits are a hash of the step, the buffer and the element's place, as in torch: a
    resumed run continues as it would have, and no random stream is used.
    """
    key = _mix_bits(2 * t.astype(jnp.uint32) + jnp.uint32(which))
    random = _mix_bits(_mix_bits(_flat_index(v)) ^ key) & jnp.uint32(0xFFFF)
    v = v.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(v, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + random) & jnp.uint32(0xFFFF0000), jnp.float32)
    # Exactly `rounded`, with the derivative of v.
    return (v + jax.lax.stop_gradient(rounded - v)).astype(jnp.bfloat16)


def _flat_index(v: jax.Array) -> jax.Array:
    """Return the index of each element in the flattened leaf, modulo 2^32."""
    index = jnp.zeros(v.shape, jnp.uint32)
    for axis in range(v.ndim):
        stride = int(np.prod(v.shape[axis + 1 :], dtype=object)) % 2**32
        index += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, v.shape, axis)
    return index


def _mix_bits(n: jax.Array) -> jax.Array:
    """Hash 32 bits, as `mix_bits` of torch/kernels does."""
    n = (n ^ (n >> 16)) * jnp.uint32(0x21F0AAAD)
    n = (n ^ (n >> 15)) * jnp.uint32(0x735A2D97)
    return n ^ (n >> 15)


# -- the sample of coordinates on which the displacement is measured -------------------------


@jax.jit
def fast_iterate_sample(p: jax.Array, master: Any, e: jax.Array) -> jax.Array:
    """Return z on the sample of its coordinates."""
    y = full_precision(p, master)
    return sample(y) + INTERPOLATION * sample(e).astype(y.dtype)


def sample(leaf: jax.Array) -> jax.Array:
    """Return every k-th coordinate of the flattened leaf, with k = `sample_stride`, replicated."""
    mesh = explicit_mesh(leaf)
    if mesh is None and untuned_rule.sample_stride(leaf.size) == 1:
        return leaf.ravel()
    # Gathered by index, so that a sharded leaf need not be flattened.
    leaf = leaf if leaf.ndim else leaf[None]
    at = leaf.at[_sample_indices(leaf.shape)]
    # A mesh with explicit axes needs `out_sharding`, an argument that jax 0.4 does not have.
    return at.get() if mesh is None else at.get(out_sharding=NamedSharding(mesh, _REPLICATED))


@functools.lru_cache(maxsize=1024)
def _sample_indices(shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], ...]:
    size = int(np.prod(shape, dtype=object))
    flat = np.arange(0, size, untuned_rule.sample_stride(size))
    return tuple(index.astype(np.int32) for index in np.unravel_index(flat, shape))


def rows(table: jax.Array) -> list[jax.Array]:
    """Return the rows of a matrix, each read through an index that is an operand.

    `table[i]` would be a constant in the kernel of leaf i. So would an index of one entry.
    """
    return [_first_of(table, np.array([i, i + 1], np.int32)) for i in range(table.shape[0])]


@jax.jit
def _first_of(table: jax.Array, indices: jax.Array) -> jax.Array:
    return table.at[indices].get(mode="clip")[0]
