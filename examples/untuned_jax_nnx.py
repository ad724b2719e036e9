"""Train a Flax NNX model with `untuned`, validate the average, save and resume with Orbax.

python examples/untuned_jax_nnx.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits

from stormplus.jax import averaged, untuned

STEPS, BATCH = 300, 64

digits = load_digits()
images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.hidden(x)))


def loss(model, rows):
    out = model(images[rows])
    return optax.softmax_cross_entropy_with_integer_labels(out, labels[rows]).mean()


@nnx.jit
def step(model, optimizer, rows):
    optimizer.update(model, nnx.grad(loss)(model, rows))


def new_run(seed):
    model = Perceptron(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, untuned(), wrt=nnx.Param)


def main():
    model, optimizer = new_run(0)
    keys = jax.random.split(jax.random.key(0), STEPS)
    rows = [jax.random.randint(key, (BATCH,), 0, len(labels)) for key in keys]
    for batch in rows[: STEPS // 2]:
        step(model, optimizer, batch)

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "checkpoint"
        checkpointer.save(path, nnx.to_pure_dict(nnx.state((model, optimizer))))
        checkpointer.wait_until_finished()
        model, optimizer = new_run(1)
        state = nnx.state((model, optimizer))
        nnx.replace_by_pure_dict(state, checkpointer.restore(path, nnx.to_pure_dict(state)))
        nnx.update((model, optimizer), state)

    for batch in rows[STEPS // 2 :]:
        step(model, optimizer, batch)

    # Validate and save the average, not the parameters.
    nnx.update(model, averaged(optimizer.opt_state, nnx.state(model, nnx.Param)))
    accuracy = float((model(images).argmax(axis=1) == labels).mean())
    print(f"steps {int(optimizer.opt_state.step[...])}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
