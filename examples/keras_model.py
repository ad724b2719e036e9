"""Keras 3 on the torch backend: compile, fit, save, load and go on with STORM+.

python examples/keras_model.py [--epochs N]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from sklearn.datasets import load_digits

from stormplus.integrations.keras import StormPlusModelMixin, StormPlusOptimizer


@keras.saving.register_keras_serializable("examples")
class Model(StormPlusModelMixin, keras.Model):
    """A Keras model whose training step takes two gradients per batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    keras.utils.set_random_seed(0)
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")

    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(64)(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Activation("relu")(hidden)
    hidden = keras.layers.Dropout(0.1)(hidden)
    model = Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        optimizer=StormPlusOptimizer("StormPlus", learning_rate=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    fit = {"batch_size": 64, "verbose": 0}
    model.fit(x[:1400], y[:1400], epochs=epochs // 2, **fit)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "half.keras")
        model = keras.saving.load_model(Path(folder) / "half.keras")  # the optimizer's state too
    model.fit(x[:1400], y[:1400], epochs=epochs, initial_epoch=epochs // 2, **fit)

    _, accuracy = model.evaluate(x[1400:], y[1400:], verbose=0)
    taken = model.optimizer.torch_optimizer.diagnostics()
    print(
        f"{taken['step']:.0f} batches, {taken['grad_evaluations']:.0f} evaluations, accuracy "
        f"{accuracy:.3f}"
    )


if __name__ == "__main__":
    main()
