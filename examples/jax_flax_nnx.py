"""A Flax NNX model: `nnx.Optimizer` hands `grad_fn` on to the transformation.

python examples/jax_flax_nnx.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

from stormplus.jax import storm_plus

STEPS, BATCH = 300, 64

digits = load_digits()
images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.hidden(x)))


def main():
    model = Perceptron(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, storm_plus(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, rows):
        graph, params = nnx.split(model, nnx.Param)

        def loss(p):
            out = nnx.merge(graph, p)(images[rows])
            return optax.softmax_cross_entropy_with_integer_labels(out, labels[rows]).mean()

        grad_fn = jax.grad(loss)  # of the parameters, on these rows
        optimizer.update(model, grad_fn(params), grad_fn=grad_fn)

    for key in jax.random.split(jax.random.key(0), STEPS):
        step(model, optimizer, jax.random.randint(key, (BATCH,), 0, len(labels)))

    accuracy = float((model(images).argmax(axis=1) == labels).mean())
    print(f"steps {int(optimizer.opt_state.step[...])}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
