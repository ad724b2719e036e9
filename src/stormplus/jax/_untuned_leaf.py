"""One leaf of `untuned`: its step, its rounding, and the coordinates that are measured.

XLA compiles equal kernels once. These functions are therefore compiled per shape and not per leaf:
what differs between leaves of one shape comes in as an operand, never as a constant. Compile time
also grows with the number of instructions per leaf, so there are few.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stormplus import untuned_rule
from stormplus.jax._trees import is_masked, wide_dtype
from stormplus.untuned_rule import INTERPOLATION
from stormplus.versions import explicit_mesh

_REPLICATED = PartitionSpec(None)  # type: ignore[no-untyped-call, unused-ignore]


class UntunedCoefficients(NamedTuple):
    """The coefficients of a step; the names are those of torch/kernels/plain.py.

    The first three have one entry per leaf, and after `of_each_leaf` they are numbers too.
    """

    alpha: jax.Array  # the factor times eta: how far a coordinate with |g| = s moves
    max_move: jax.Array  # the largest change of one coordinate
    decay: jax.Array | None  # the fraction of z that weight decay removes; None without it
    grad_weight: jax.Array  # w, the weight of g^2 in s^2
    average_weight: jax.Array  # c, the weight of z in the average

    def of_each_leaf(self) -> list[UntunedCoefficients]:
        per_leaf = {"alpha": self.alpha, "max_move": self.max_move}
        if self.decay is not None:
            per_leaf["decay"] = self.decay
        table, count = jnp.concatenate(list(per_leaf.values())), len(self.alpha)
        columns = count * np.arange(len(per_leaf), dtype=np.uint32)
        # Not `table[columns + i]`: constant indices would be part of the kernels of one leaf.
        rows = [_take(table, columns + np.uint32(i)) for i in range(count)]
        return [self._replace(**dict(zip(per_leaf, row))) for row in rows]


@jax.jit
def _take(table: jax.Array, indices: jax.Array) -> list[jax.Array]:
    return list(table.at[indices].get(mode="promise_in_bounds"))


@jax.jit
def normalize(g: jax.Array, s: jax.Array, grad_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the new s, and u = g / s: NaN where g is not finite, 0 where no gradient has been."""
    w, s = grad_weight.astype(g.dtype), s.astype(g.dtype)
    # |a + ib| is the root of a^2 + b^2 without the squares, which overflow or underflow in float32
    # for gradients of 1e20 or 1e-20.
    s = jax.lax.abs(jax.lax.complex(jnp.sqrt(1 - w) * s, jnp.sqrt(w) * g))
    return s, g / jnp.where(s == 0, 1, s)


class LeafStep(NamedTuple):
    """What a step returns for a leaf: its update and its new buffers."""

    update: jax.Array
    master: Any
    z_minus_x: jax.Array
    grad_rms: jax.Array


@functools.partial(jax.jit, static_argnames="state_dtype")
def step_leaf(
    p: jax.Array,
    u: jax.Array,
    coefficients: UntunedCoefficients,
    *,
    master: Any,
    e: jax.Array,
    s: jax.Array,
    s_new: jax.Array,
    step: jax.Array,
    finite: jax.Array,
    state_dtype: Any,
) -> LeafStep:
    """Make one step.

    `s` and `s_new` are the root mean square gradients before and after it, and `u` is the gradient
    divided by `s_new`; `e`, `master` and `state_dtype` are as in `untuned`. The step has no effect
    unless all gradients are `finite`.
    """
    dtype, b = wide_dtype(p), INTERPOLATION
    alpha, max_move, decay, _, c = jax.tree.map(lambda v: v.astype(dtype), coefficients)
    y, e_old = full_precision(p, master), e.astype(dtype)

    move = jnp.clip(alpha * u, -max_move, max_move)
    if decay is not None:
        move = move + decay * (y + b * e_old)
    # z <- z - move, x <- x + c (z - x), y <- (1 - b) z + b x, in terms of y and e = z - x.
    m = e_old - move
    change = jnp.where(finite, (c + (1 - b) * (1 - c)) * m - (1 - b) * e_old, 0)
    e_new = (1 - c) * m
    if state_dtype is not None:
        e_new, s_new = stochastic_round(e_new, step, 0), stochastic_round(s_new, step, 1)
    if not is_masked(master):
        master = jnp.where(finite, y + change, master)
        change = _round_to(p.dtype, master) - p.astype(dtype)
    return LeafStep(
        update=change.astype(p.dtype),
        master=master,
        z_minus_x=jnp.where(finite, e_new, e),
        grad_rms=jnp.where(finite, s_new, s),
    )


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


# -- the coordinates on which the displacement is measured -----------------------------------


def coordinates(leaf: jax.Array) -> jax.Array:
    """Return every k-th coordinate of the flattened leaf, with k = `sample_stride`, replicated."""
    whole = explicit_mesh(leaf) is None and untuned_rule.sample_stride(leaf.size) == 1
    selected: jax.Array = leaf.reshape(-1) if whole else _gather_coordinates(leaf)
    return selected


@jax.jit
def _gather_coordinates(leaf: jax.Array) -> jax.Array:
    # Gathered by index, so that a sharded leaf need not be flattened.
    mesh = explicit_mesh(leaf)
    # A mesh with explicit axes needs `out_sharding`, an argument that jax 0.4 does not have.
    options: dict[str, Any] = (
        {} if mesh is None else {"out_sharding": NamedSharding(mesh, _REPLICATED)}
    )
    leaf = leaf if leaf.ndim else leaf[None]
    at = leaf.at[_coordinate_indices(leaf.shape)]
    gathered: jax.Array = at.get(mode="promise_in_bounds", **options)
    return gathered


@functools.lru_cache(maxsize=1024)
def _coordinate_indices(shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], ...]:
    size = int(np.prod(shape, dtype=object))
    flat = np.arange(0, size, untuned_rule.sample_stride(size))
    return tuple(index.astype(np.uint32) for index in np.unravel_index(flat, shape))
