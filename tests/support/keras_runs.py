"""Keras models on torch, their runs, and the loop that they are compared with."""

import os

import pytest
import torch
from plain_loop import BATCH, CLASSES, FEATURES, batches, data, network
from torch.nn import functional as F

from stormplus import StormPlus

os.environ["KERAS_BACKEND"] = "torch"
keras = pytest.importorskip("keras")
from stormplus.integrations.keras import KerasStorm, StormTraining  # noqa: E402

EPOCHS = 2
SAMPLES = len(batches(EPOCHS))


@keras.saving.register_keras_serializable("tests")
class Model(StormTraining, keras.Model):
    pass


class TorchInside(StormTraining, keras.Model):
    """A torch module in a Keras model, so that the plain loop can run the very same module."""

    def __init__(self):
        super().__init__()
        self.inside = keras.layers.TorchModuleWrapper(network())

    def call(self, x, training=False):
        return self.inside(x, training=training)


def keras_network(dropout=0.3, kind=Model, dtype="float32", seed=0, seeded=True):
    keras.utils.set_random_seed(seed)
    x = keras.Input((FEATURES,))
    h = keras.layers.Dense(8, dtype=dtype)(x)
    h = keras.layers.BatchNormalization(momentum=0.75, dtype=dtype)(h)
    h = keras.layers.Activation("tanh", dtype=dtype)(h)
    h = keras.layers.Dropout(dropout, dtype=dtype)(h)  # from torch's random stream
    if seeded:
        h = keras.layers.Dropout(dropout, seed=1, dtype=dtype)(h)  # from a seed generator
    return kind(x, keras.layers.Dense(CLASSES, dtype=dtype)(h))


@keras.saving.register_keras_serializable("tests")
def cross_entropy(y, out):
    return F.cross_entropy(out.float() if out.dtype == torch.bfloat16 else out, y.long())


class Watch(keras.callbacks.Callback):
    """One seed a sample, as the plain loop has it; notes where the model is afterwards."""

    def __init__(self, take, first=0):
        super().__init__()
        self.take, self.number, self.snapshots = take, first, []

    def on_train_batch_begin(self, batch, logs=None):
        torch.manual_seed(self.number)

    def on_train_batch_end(self, batch, logs=None):
        self.number += 1
        self.snapshots.append(self.take())


def variables(model):
    return {f"{i}": v.value.detach().clone() for i, v in enumerate(model.weights)}


def fitted(model, take=None, epochs=EPOCHS, callbacks=(), first=0, **options):
    if not model.compiled:
        model.compile(optimizer=KerasStorm(**options), loss=cross_entropy)
    watch = Watch(take or (lambda: variables(model)), first)
    x, y = data()
    model.fit(
        x.numpy(), y.numpy(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[watch, *callbacks],
    )  # fmt: skip
    return watch.snapshots


def plain_keras(model, **options):
    """Keras layers in a loop that puts seeds and statistics back by hand."""
    opt = StormPlus([v.value for v in model.trainable_variables], **options)
    run, evaluations = [], 0
    for i, (x, y) in enumerate(batches(EPOCHS)):

        def backward():
            torch.manual_seed(i)
            model.zero_grad()
            cross_entropy(y, model(x, training=True)).backward()

        if opt.started:
            kept = [v.numpy().copy() for v in model.non_trainable_variables]
            backward()
            for v, value in zip(model.non_trainable_variables, kept):
                v.assign(value)
            opt.move()
            evaluations += 1
        backward()
        opt.estimate()
        evaluations += 1
        run.append(variables(model))
    return run, evaluations, opt
