"""What the tests of the JAX backend optimise, and how they step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stormplus.jax import simplified_storm_plus, storm, storm_plus

METHODS = {
    "storm+": storm_plus,
    "simplified-storm+": simplified_storm_plus,
    "storm": storm,
}


class Regression:
    """A perceptron with tanh units: the curvature differs from sample to sample."""

    def __init__(self, rows=64):
        rng = np.random.default_rng(0)
        self.inputs = rng.standard_normal((rows, 5))
        self.targets = np.sin(self.inputs.sum(axis=1))
        self.x0 = [
            rng.standard_normal((5, 6)) / 2,
            rng.standard_normal(6) / 10,
            rng.standard_normal(6) / 2,
        ]

    def loss(self, params, rows):
        w1, b1, w2 = params
        hidden = jnp.tanh(jnp.asarray(self.inputs)[rows] @ w1 + b1)
        return jnp.mean((hidden @ w2 - jnp.asarray(self.targets)[rows]) ** 2)

    def grad(self, params, rows):
        return jax.grad(self.loss)(params, rows)

    def numpy_grad(self, params, rows):
        """The same by hand, for the reference: no compilation, no dispatch."""
        w1, b1, w2 = params
        inputs, hidden = self.inputs[rows], np.tanh(self.inputs[rows] @ w1 + b1)
        error = 2 * (hidden @ w2 - self.targets[rows]) / len(rows)
        before = error[:, None] * w2 * (1 - hidden**2)
        return [inputs.T @ before, before.sum(axis=0), hidden.T @ error]

    def sample(self, rng):
        return rng.integers(len(self.targets), size=4)

    def params(self, dtype=None):
        return [jnp.asarray(block, dtype) for block in self.x0]


def step_of(tx, grad, *, jit=True):
    """`step(params, state, sample)` for `grad(params, sample)`, as a user would write it."""

    def step(params, state, sample):
        def grad_fn(p):
            return grad(p, sample)

        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    return jax.jit(step) if jit else step


def run(tx, grad, params, samples, state=None):
    """All samples in one `lax.scan`."""
    step = step_of(tx, grad, jit=False)
    state = tx.init(params) if state is None else state

    def body(carry, sample):
        return step(*carry, sample), None

    return jax.jit(lambda c, xs: jax.lax.scan(body, c, xs)[0])((params, state), samples)


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def assert_trees_close(a, b, **tolerance):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(
            np.asarray(left, np.float64), np.asarray(right, np.float64), **tolerance
        )
