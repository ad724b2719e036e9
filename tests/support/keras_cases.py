"""Keras models on torch, their runs, and the loop that they are compared with."""

import os

import torch
from trainer_cases import BATCHES, EPOCHS, ROWS, Run, data, distance, network, nothing, snapshot

from stormplus import StormPlus

os.environ["KERAS_BACKEND"] = "torch"
import keras

from stormplus.integrations.keras import StormPlusModelMixin, StormPlusOptimizer

FEATURES = 6


@keras.saving.register_keras_serializable("tests")
class Model(StormPlusModelMixin, keras.Model):
    pass


class Inside(keras.Model):
    """A torch module in a Keras model, so that the plain loop can run the very same module."""

    def __init__(self):
        super().__init__()
        self.inside = keras.layers.TorchModuleWrapper(network(torch.float32))

    def call(self, x, training=False):
        return self.inside(x, training=training)


class TorchInside(StormPlusModelMixin, Inside):
    pass


@keras.saving.register_keras_serializable("tests")
def keras_distance(y, out):
    return distance(out, y.to(torch.float32))


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, lr, schedule):
        self.lr, self.schedule = lr, schedule

    def __call__(self, step):
        return self.lr * self.schedule(int(step))


class Recorder(keras.callbacks.Callback):
    """One seed per sample, as in the plain loop; records where the model is afterwards."""

    def __init__(self, run, take, first=0, after=nothing):
        super().__init__()
        self.run, self.take, self.number, self.after = run, take, first, after

    def on_train_batch_begin(self, batch, logs=None):
        torch.manual_seed(self.number)

    def on_train_batch_end(self, batch, logs=None):
        self.number += 1
        self.run.states.append(self.take())
        self.after(self.run.net)

    def on_test_batch_end(self, batch, logs=None):
        self.run.validated[self.number] = self.take()


def variables(model):
    return {f"{i}": v.value.detach().clone() for i, v in enumerate(model.weights)}


def compiled(model, *args, **options):
    model.compile(optimizer=StormPlusOptimizer(*args, **options), loss=keras_distance)
    return model


def fitted(
    model, take=None, epochs=EPOCHS, callbacks=(), first=0, run=None, after=nothing, watch=False,
    **options,
):  # fmt: skip
    if not model.compiled:
        compiled(model, **options)
    run = run or Run()
    recorder = Recorder(run, take or (lambda: variables(model)), first, after)
    x, y = (part.numpy() for part in data(dtype=torch.float32))
    held_out = {"validation_data": (x[:ROWS], y[:ROWS]), "validation_batch_size": ROWS}
    model.fit(
        x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[recorder, *callbacks], **held_out if watch else {},
    )  # fmt: skip
    run.opt, run.trainer = model.optimizer.torch_optimizer, model
    return run


def fit(
    folder, *callbacks, kind=StormPlus, tool=True, epochs=EPOCHS, schedule=None, setup=nothing,
    after=nothing, lr=1.0, run=None, dtype=torch.float32, watch=False, resume=False,
):  # fmt: skip
    rate = lr if schedule is None else Schedule(lr, schedule)

    def made(path=None):
        """A compiled model, with the weights and the optimizer's state of a file."""
        model = compiled(TorchInside() if tool else Inside(), kind.__name__, learning_rate=rate)
        if path is not None:
            model(data(1, dtype)[0])
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        return model

    model = made(folder / f"{BATCHES}.weights.h5" if resume else None)
    run = run or Run()
    net = run.net = model.inside.module
    setup(net)
    first = BATCHES * resume

    class Saves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.save_weights(folder / f"{first + BATCHES * (epoch + 1)}.weights.h5")

    fitted(
        model, lambda: snapshot(net), epochs - resume, [*callbacks, *[Saves()] * watch], first, run,
        after, watch,
    )  # fmt: skip
    if watch:
        paths = {int(path.name.split(".")[0]): path for path in folder.glob("*.weights.h5")}
        run.saved = {step: snapshot(made(path).inside.module) for step, path in paths.items()}
    return run


def again(run):
    fitted(run.trainer, lambda: snapshot(run.net), first=len(run.states), run=run)


def keras_network(dropout=0.3, kind=Model, dtype="float32", seed=0, seeded=True):
    keras.utils.set_random_seed(seed)
    x = keras.Input((FEATURES,))
    h = keras.layers.Dense(8, dtype=dtype)(x)
    h = keras.layers.BatchNormalization(momentum=0.75, dtype=dtype)(h)
    h = keras.layers.Activation("tanh", dtype=dtype)(h)
    h = keras.layers.Dropout(dropout, dtype=dtype)(h)  # from torch's random stream
    if seeded:
        h = keras.layers.Dropout(dropout, seed=1, dtype=dtype)(h)  # from a seed generator
    return kind(x, keras.layers.Dense(1, dtype=dtype)(h))


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
        run.states.append(variables(model))
    return run
