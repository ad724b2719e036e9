"""What the tests of the JAX backend optimize, how they step, and the table of optimizers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stormplus.jax import simplified_storm_plus, storm, storm_plus, untuned
from stormplus.rules import Sum

PAIRED = {
    "storm_plus": storm_plus,
    "simplified_storm_plus": simplified_storm_plus,
    "storm": storm,
}
TRANSFORMATIONS = PAIRED | {"untuned": untuned}
REFERENCE = {name: name.replace("_plus", "+").replace("_", "-") for name in PAIRED}

# The fields of the state that are of the size of the parameters.
BUFFERS = dict.fromkeys(PAIRED, ("estimator",)) | {"untuned": ("z_minus_x", "grad_rms")}
# The argument that multiplies the steps.
RATE = dict.fromkeys(PAIRED, "lr") | {"untuned": "factor"}

PARAMS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
CURVATURES = jnp.array([1.0, 3.0, 2.0, 5.0, 0.5, 1.0])


def quadratic(x, sample):
    """The gradient of sample * |x|^2 / 2: the sample is the curvature."""
    return jax.tree.map(lambda leaf: jnp.asarray(sample).astype(leaf.dtype) * leaf, x)


def the_sample(p, sample):
    """The gradient of a linear objective."""
    return sample


class Regression:
    """A perceptron with tanh units: the curvature differs from sample to sample."""

    def __init__(self):
        draw = np.random.default_rng(0).standard_normal
        self.inputs = draw((64, 5))
        self.targets = np.sin(self.inputs.sum(axis=1))
        self.x0 = [draw((5, 6)) / 2, draw(6) / 10, draw(6) / 2]

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


@functools.cache
def compiled(name, grad=quadratic, **options):
    """A transformation and its step, compiled once for all the tests."""
    tx = TRANSFORMATIONS[name](**options)
    return tx, step_of(tx, grad)


def walk(name, samples=CURVATURES, params=PARAMS, state=None, grad=quadratic, **options):
    """All samples, one call each."""
    tx, step = compiled(name, grad, **options)
    state = tx.init(params) if state is None else state
    for sample in samples:
        params, state = step(params, state, sample)
    return params, state


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def totals(tree):
    """Sums by their totals: the rounding errors differ from program to program."""
    return jax.tree.map(
        lambda node: node.total if isinstance(node, Sum) else node,
        tree,
        is_leaf=lambda node: isinstance(node, Sum),
    )


def assert_trees_close(a, b, **tolerance):
    a, b = totals(a), totals(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(
            np.asarray(left, np.float64), np.asarray(right, np.float64), **tolerance
        )


def assert_finite(tree):
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(tree))
