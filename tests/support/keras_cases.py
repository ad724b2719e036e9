"""Keras models on torch, their runs, and the loop that they are compared with."""

import os
from contextlib import suppress

import torch
from trainer_cases import BATCHES, EPOCHS, ROWS, Run, data, distance, network, snapshot

from stormplus import StormPlus, Untuned

os.environ["KERAS_BACKEND"] = "torch"
import keras

from stormplus.integrations.keras import ClosureTraining, KerasOptimizer

FEATURES = 6


@keras.saving.register_keras_serializable("tests")
class Model(ClosureTraining, keras.Model):
    pass


class Inside(keras.Model):
    """A torch module in a Keras model, so that the plain loop can run the very same module."""

    def __init__(self):
        super().__init__()
        self.inside = keras.layers.TorchModuleWrapper(network(torch.float32))

    def call(self, x, training=False):
        return self.inside(x, training=training)


class TorchInside(ClosureTraining, Inside):
    pass


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


@keras.saving.register_keras_serializable("tests")
def keras_distance(y, out):
    return distance(out, y.to(torch.float32))


class Watch(keras.callbacks.Callback):
    """One seed a sample, as the plain loop has it; notes where the model is afterwards."""

    def __init__(self, run, take, first=0):
        super().__init__()
        self.run, self.take, self.number = run, take, first

    def on_train_batch_begin(self, batch, logs=None):
        torch.manual_seed(self.number)

    def on_train_batch_end(self, batch, logs=None):
        self.number += 1
        self.run.states.append(self.take())


def variables(model):
    return {f"{i}": v.value.detach().clone() for i, v in enumerate(model.weights)}


def compiled(model, *args, **options):
    model.compile(optimizer=KerasOptimizer(*args, **options), loss=keras_distance)
    return model


def fitted(model, take=None, epochs=EPOCHS, callbacks=(), first=0, run=None, **options):
    if not model.compiled:
        compiled(model, **options)
    run = run or Run()
    watch = Watch(run, take or (lambda: variables(model)), first)
    x, y = data(dtype=torch.float32)
    model.fit(
        x.numpy(), y.numpy(), batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[watch, *callbacks],
    )  # fmt: skip
    run.opt, run.trainer = model.optimizer.torch_optimizer, model
    return run


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, lr, schedule):
        self.lr, self.schedule = lr, schedule

    def __call__(self, step):
        return self.lr * self.schedule(int(step))


def fit(
    folder, *, kind=StormPlus, tool=True, epochs=EPOCHS, schedule=None, setup=lambda net: None,
    lr=1.0, run=None, dtype=torch.float32,
):  # fmt: skip
    model = TorchInside() if tool else Inside()
    net = model.inside.module
    setup(net)
    rate = lr if schedule is None else Schedule(lr, schedule)
    run = fitted(
        model, lambda: snapshot(net), epochs, run=run, method=kind.__name__, learning_rate=rate
    )
    run.net = net
    return run


def plain_keras(model, **options):
    """Keras layers in a loop that puts seeds and statistics back by hand."""
    run = Run()
    opt = run.opt = StormPlus([v.value for v in model.trainable_variables], **options)
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


# -- resuming. Without a seed generator: Keras itself does not save where those stand. ------------


def by_model(folder):
    first = fitted(keras_network(seeded=False), epochs=1)
    first.trainer.save(folder / "half.keras")
    again = keras.saving.load_model(folder / "half.keras")
    assert type(again) is Model
    return first, fitted(again, epochs=1, first=BATCHES)


def by_weights(folder):
    first = fitted(keras_network(seeded=False), epochs=1)
    first.trainer.save_weights(folder / "half.weights.h5")
    again = compiled(keras_network(seed=1, seeded=False))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(folder / "half.weights.h5")
    return first, fitted(again, epochs=1, first=BATCHES)


def by_backup(folder):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    first, saves, loads = Run(), *(keras.callbacks.BackupAndRestore(folder / "b") for _ in range(2))
    with suppress(KeyboardInterrupt):
        fitted(keras_network(seeded=False), run=first, callbacks=[saves, Stop()])
    again = compiled(keras_network(seed=1, seeded=False))
    return first, fitted(again, callbacks=[loads], first=BATCHES)


RESUMES = {"save": by_model, "save_weights": by_weights, "BackupAndRestore": by_backup}


# -- Untuned -------------------------------------------------------------------------------------


class Validated(keras.callbacks.Callback):
    """Where the network was validated, by the number of steps so far."""

    def __init__(self, run, net):
        super().__init__()
        self.run, self.net = run, net
        run.validated = {}

    def on_test_batch_end(self, batch, logs=None):
        self.run.validated[len(self.run.states)] = snapshot(self.net)


def inside(folder=None, epoch=None):
    """A compiled model, with the weights of a file."""
    model = compiled(TorchInside(), Untuned.__name__)
    x, _ = data(1, dtype=torch.float32)
    model(x)
    model.optimizer.build(model.trainable_variables)
    if folder is not None:
        model.load_weights(folder / f"{epoch}.weights.h5")
    return model


def untuned(folder, epochs=EPOCHS, model=None, first=0, callbacks=()):
    model = model or inside()
    net, run = model.inside.module, Run()
    run.net = net
    saves = keras.callbacks.ModelCheckpoint(
        folder / "{epoch}.weights.h5", save_weights_only=True, monitor="val_loss"
    )
    watch = Watch(run, lambda: snapshot(net), first)
    x, y = data(dtype=torch.float32)
    model.fit(
        x.numpy(), y.numpy(), batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0,
        validation_data=(x.numpy()[:ROWS], y.numpy()[:ROWS]), validation_batch_size=ROWS,
        callbacks=[watch, Validated(run, net), saves, *callbacks],
    )  # fmt: skip
    run.opt, run.trainer = model.optimizer.torch_optimizer, model
    run.saved = {
        BATCHES * epoch: snapshot(inside(folder, epoch).inside.module)
        for epoch in range(1, epochs + 1)
    }
    return run


def untuned_in_two(folder):
    first = untuned(folder, epochs=1)
    return first, untuned(folder, epochs=1, model=inside(folder, 1), first=BATCHES)
