"""Train an Equinox model with `untuned`, validate the average, save and resume with Orbax.

python examples/untuned_jax_equinox.py
"""

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

from stormplus.jax import averaged, untuned

STEPS, BATCH = 300, 64

digits = load_digits()
images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


def main():
    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
    # The arrays that are trained, and all the rest (activations, sizes).
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    tx = untuned()
    state = tx.init(params)

    def loss(params, rows):
        out = jax.vmap(eqx.combine(params, rest))(images[rows])
        return optax.softmax_cross_entropy_with_integer_labels(out, labels[rows]).mean()

    @jax.jit
    def step(params, state, rows):
        updates, state = tx.update(jax.grad(loss)(params, rows), state, params)
        return eqx.apply_updates(params, updates), state

    keys = jax.random.split(jax.random.key(1), STEPS)
    rows = [jax.random.randint(key, (BATCH,), 0, len(labels)) for key in keys]
    for batch in rows[: STEPS // 2]:
        params, state = step(params, state, batch)

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "checkpoint"
        # Orbax saves lists of arrays; the structure comes from the program.
        arrays, structure = jax.tree.flatten((params, state))
        checkpointer.save(path, arrays)
        checkpointer.wait_until_finished()
        params, state = jax.tree.unflatten(structure, checkpointer.restore(path, arrays))

    for batch in rows[STEPS // 2 :]:
        params, state = step(params, state, batch)

    # Validate and save the average, not the parameters.
    model = eqx.combine(averaged(state, params), rest)
    accuracy = float((jax.vmap(model)(images).argmax(axis=1) == labels).mean())
    print(f"steps {int(state.step)}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
