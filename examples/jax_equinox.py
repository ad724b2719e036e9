"""An Equinox model: `grad_fn` is a function of its arrays.

python examples/jax_equinox.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from stormplus.jax import storm_plus

STEPS, BATCH = 300, 64

digits = load_digits()
images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


def loss(model, rows):
    out = jax.vmap(model)(images[rows])
    return optax.softmax_cross_entropy_with_integer_labels(out, labels[rows]).mean()


def main():
    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
    # The arrays that are trained, and all the rest (activations, sizes).
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    tx = storm_plus()
    state = tx.init(params)

    @jax.jit
    def step(params, state, rows):
        def grad_fn(p):
            return jax.grad(lambda q: loss(eqx.combine(q, rest), rows))(p)

        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return eqx.apply_updates(params, updates), state

    for key in jax.random.split(jax.random.key(1), STEPS):
        params, state = step(params, state, jax.random.randint(key, (BATCH,), 0, len(labels)))

    model = eqx.combine(params, rest)
    accuracy = float((jax.vmap(model)(images).argmax(axis=1) == labels).mean())
    print(f"steps {int(state.step)}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
