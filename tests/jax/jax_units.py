"""What the tests of STORM+ in measured units share."""

import functools

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_problems import (
    run,
    step_of,
)

from stormplus.jax import untuned

STEPS = 200
ROWS = np.random.default_rng(3).integers(64, size=(STEPS, 4))
MODES = pytest.mark.parametrize("correction", [False, True])


def one_gradient(tx, grad, params, samples, state=None):
    """All samples in one scan, as a user of any optax optimizer writes it: no grad_fn."""
    state = tx.init(params) if state is None else state

    def body(carry, sample):
        params, state = carry
        updates, state = tx.update(grad(params, sample), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))((params, state), samples)


def train(correction, tx, grad, params, samples):
    if correction:
        return run(tx, grad, params, samples)
    return one_gradient(tx, grad, params, samples)[0]


PARAMS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
CURVATURES = jnp.array([1.0, 3.0, 2.0, 5.0, 0.5, 1.0])


def quadratic(x, sample):
    return jax.tree.map(lambda leaf: sample * leaf, x)


@functools.cache
def compiled(correction, **options):
    """A transformation and its step on a quadratic, compiled once for all the tests."""
    tx = untuned(correction=correction, **options)
    return tx, step_of(tx, quadratic)


def walk(correction, samples=CURVATURES, params=PARAMS, state=None, **options):
    tx, step = compiled(correction, **options)
    state = tx.init(params) if state is None else state
    for sample in samples:
        params, state = step(params, state, sample)
    return params, state


def parts(correction, state):
    """The template's scalars and buffers, and what has been measured."""
    return (state.storm, state.units) if correction else (state, state)


def eager(tx, samples=CURVATURES, params=PARAMS, grad=quadratic):
    """One gradient a step, uncompiled."""
    state = tx.init(params)
    for sample in samples:
        updates, state = tx.update(grad(params, sample), state, params)
        params = optax.apply_updates(params, updates)
    return params, state
