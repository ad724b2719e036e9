"""The whole training loop on the device, with dropout: `lax.scan` over keys.

`grad_fn` closes over the batch and the key, so both evaluations of a step see the same
rows and drop the same units. Nothing else is needed for "the same sample".

    python examples/jax_scan_dropout.py
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from stormplus.jax import storm_plus, uniform_iterate, verify

STEPS, BATCH, HIDDEN, DROPPED = 600, 64, 128, 0.2

digits = load_digits()
images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
train, test = slice(0, 1500), slice(1500, None)


def logits(params, x, dropout_key=None):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    if dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1 - DROPPED, hidden.shape)
        hidden = jnp.where(kept, hidden / (1 - DROPPED), 0)
    return hidden @ params["w2"] + params["b2"]


def loss(params, rows, dropout_key):
    out = logits(params, images[rows], dropout_key)
    return optax.softmax_cross_entropy_with_integer_labels(out, labels[rows]).mean()


def accuracy(params, part):
    return float((logits(params, images[part]).argmax(axis=1) == labels[part]).mean())


def main():
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(k1, (64, HIDDEN)) * jnp.sqrt(2 / 64),
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(k2, (HIDDEN, 10)) * jnp.sqrt(2 / HIDDEN),
        "b2": jnp.zeros(10),
    }
    tx, reservoir = storm_plus(), uniform_iterate()

    def step(carry, key):
        params, state, chosen = carry
        batch_key, dropout_key = jax.random.split(key)
        rows = jax.random.randint(batch_key, (BATCH,), 0, train.stop)

        def grad_fn(p):  # the sample is (rows, dropout_key)
            return jax.grad(loss)(p, rows, dropout_key)

        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        params = optax.apply_updates(params, updates)
        return (params, state, reservoir.update(chosen, params)), state.step_size

    carry = (params, tx.init(params), reservoir.init(params))
    (params, state, chosen), step_sizes = jax.jit(
        lambda carry, keys: jax.lax.scan(step, carry, keys)
    )(carry, jax.random.split(k3, STEPS))

    verify(state)  # the two evaluations of the first step agreed
    print(f"steps {int(state.step)}, moves {int(state.moves)}, skipped {int(state.skipped)}")
    print(f"step size {float(step_sizes[0]):.3f} -> {float(step_sizes[-1]):.3f}")
    print(f"train accuracy {accuracy(params, train):.3f}, test {accuracy(params, test):.3f}")
    print(f"uniform iterate of {int(chosen.step)}: test {accuracy(chosen.point, test):.3f}")


if __name__ == "__main__":
    main()
