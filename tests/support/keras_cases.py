"""Keras models on torch, their runs, and the loop that they are compared with."""

import os

import torch

from stormplus import StormPlus
from tests.support.trainer_cases import (
    BATCHES,
    EPOCHS,
    ROWS,
    Run,
    Settings,
    data,
    distance,
    snapshot,
)

os.environ["KERAS_BACKEND"] = "torch"
import keras

from stormplus.integrations.keras import StormPlusModelMixin, StormPlusOptimizer

FEATURES = 6


@keras.saving.register_keras_serializable("tests")
class Model(StormPlusModelMixin, keras.Model):
    pass


class Inside(keras.Model):
    """A torch module in a Keras model, so that the plain loop can run the very same module."""

    def __init__(self, net):
        super().__init__()
        self.inside = keras.layers.TorchModuleWrapper(net)

    def call(self, x, training=False):
        return self.inside(x, training=training)


class TorchInside(StormPlusModelMixin, Inside):
    pass


@keras.saving.register_keras_serializable("tests")
def keras_distance(y, out):
    return distance(out, y.to(torch.float32))


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, s):
        self.s = s

    def __call__(self, step):
        return self.s.lr * self.s.schedule(int(step))


class Recorder(keras.callbacks.Callback):
    """One seed per sample, as in the plain loop."""

    def __init__(self, s, first):
        super().__init__()
        self.s, self.number = s, first

    def take(self):
        """The torch module if there is one, else Keras's variables."""
        if self.s.run.net is not None:
            return snapshot(self.s.run.net)
        return {f"{i}": v.value.detach().clone() for i, v in enumerate(self.model.weights)}

    def on_train_batch_begin(self, batch, logs=None):
        torch.manual_seed(self.number)

    def on_train_batch_end(self, batch, logs=None):
        self.number += 1
        # Keras reports the mean of the epoch so far.
        self.s.run.losses.append((batch + 1) * logs["loss"] - sum(self.s.run.losses))
        self.s.run.states.append(self.take())
        self.s.after(self.s.run.net)

    def on_test_batch_end(self, batch, logs=None):
        self.s.run.validated[self.number] = self.take()

    def on_epoch_end(self, epoch, logs=None):
        if self.s.watch:
            self.model.save_weights(self.s.folder / f"{self.number}.weights.h5")


def compiled(model, *args, **options):
    model.compile(optimizer=StormPlusOptimizer(*args, **options), loss=keras_distance)
    return model


def fitted(model, *callbacks, first=0, epochs=EPOCHS, s=None, **options):
    if not model.compiled:
        compiled(model, **options)
    s = s or Settings(run=Run())
    s.run.trainer, s.run.settings = model, s
    x, y = (part.numpy() for part in data(dtype=torch.float32))
    held_out = {"validation_data": (x[:ROWS], y[:ROWS]), "validation_batch_size": ROWS}
    model.fit(
        x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[Recorder(s, first), *callbacks], **held_out if s.watch else {},
    )  # fmt: skip
    s.run.opt = model.optimizer.torch_optimizer
    return s.run


def train(s):
    rate = s.lr if s.schedule is None else Schedule(s)

    def made(net, path=None):
        """A compiled model, with the weights and the optimizer's state of a file."""
        model = TorchInside(net) if s.tool else Inside(net)
        compiled(model, s.kind.__name__, learning_rate=rate)
        if path is not None:
            model(data(1, s.dtype)[0])
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        return model

    path = s.folder / f"{BATCHES}.weights.h5" if s.resume else None
    model, net = made(s.network(), path), s.run.net
    fitted(model, *s.callbacks, first=BATCHES * s.resume, epochs=s.epochs - s.resume, s=s)
    for path in s.folder.glob("*.weights.h5") if s.watch else ():
        s.run.saved[int(path.name.split(".")[0])] = snapshot(made(s.network(), path).inside.module)
    s.run.net = net


def again(run):
    fitted(run.trainer, first=len(run.states), s=run.settings)


def evaluate(run):
    """Evaluate in one of Keras's ways, another one after each step."""
    x, y = data(1, torch.float32)
    ways = [
        lambda model: model.predict(x, verbose=0),
        lambda model: model.predict_on_batch(x),
        lambda model: model.test_on_batch(x, y),
        lambda model: model.evaluate(x, y, verbose=0),
    ]
    ways[len(run.states) % len(ways)](run.trainer)


def keras_network(dtype="float32", seed=0, seeded=True):
    keras.utils.set_random_seed(seed)
    x = keras.Input((FEATURES,))
    h = keras.layers.Dense(8, dtype=dtype)(x)
    h = keras.layers.BatchNormalization(momentum=0.75, dtype=dtype)(h)
    h = keras.layers.Activation("tanh", dtype=dtype)(h)
    h = keras.layers.Dropout(0.3, dtype=dtype)(h)  # from torch's random stream
    if seeded:
        h = keras.layers.Dropout(0.3, seed=1, dtype=dtype)(h)  # from a seed generator
    return Model(x, keras.layers.Dense(1, dtype=dtype)(h))


def plain_keras(model):
    """Keras layers in a loop that restores seeds and statistics by hand."""
    run = Run()
    opt = run.opt = StormPlus([v.value for v in model.trainable_variables])
    batches = list(zip(*(part.split(ROWS) for part in data(dtype=torch.float32))))
    for i, (x, y) in enumerate(batches * EPOCHS):

        def backward():
            torch.manual_seed(i)
            model.zero_grad()
            keras_distance(y, model(x, training=True)).backward()

        if opt.started:
            kept = [v.numpy().copy() for v in model.non_trainable_variables]
            backward()
            for v, value in zip(model.non_trainable_variables, kept):
                v.assign(value)
            opt.move()
        backward()
        opt.estimate()
        run.states.append({f"{i}": v.value.detach().clone() for i, v in enumerate(model.weights)})
    return run
