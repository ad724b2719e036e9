"""The paper's output: a point uniform over x_1..x_T, by reservoir sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stormplus.jax._trees import PyTree, safe_increment


class UniformIterateState(NamedTuple):
    """The state of `uniform_iterate`.

    Attributes:
        step: How many points have been seen.
        key: The raw key of a random stream that is used for nothing else.
        point: A point uniform over those seen.
    """

    step: jax.Array
    key: jax.Array
    point: PyTree


class UniformIterate(NamedTuple):
    """Two pure functions, as in an optax transformation."""

    init: Callable[[PyTree], UniformIterateState]
    update: Callable[[UniformIterateState, PyTree], UniformIterateState]


def uniform_iterate(seed: int = 0) -> UniformIterate:
    """Keep a point uniform over x_1..x_T, without knowing T.

        reservoir = uniform_iterate()
        chosen = reservoir.init(params)
        ...                                           # tx.update, optax.apply_updates
        chosen = reservoir.update(chosen, params)     # once per sample: the first time with x_1
        chosen.point

    `init` counts no point; it only gives the state its shape. Costs one copy of the parameters.

    Args:
        seed: Seed of the random stream. Equal seeds choose equal indices.
    """

    def init(params: PyTree) -> UniformIterateState:
        # Copies, so that a step can donate both the parameters and this state.
        point = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        # Raw key data and not a typed key: any checkpoint library can save it.
        key = jax.random.key_data(jax.random.key(seed))
        return UniformIterateState(jnp.zeros((), jnp.int32), key, point)

    def update(state: UniformIterateState, params: PyTree) -> UniformIterateState:
        step = safe_increment(state.step)
        stream = jax.random.fold_in(jax.random.wrap_key_data(state.key), step)
        take = jax.random.randint(stream, (), 0, step) == 0  # Alg. 1, line 8: probability 1/t
        point = jax.tree.map(lambda p, old: jnp.where(take, p, old), params, state.point)
        return UniformIterateState(step, state.key, point)

    return UniformIterate(init, update)
