"""Keras 3 on torch: what only it does. What trainers share is in `test_trainers.py`."""

import importlib
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from tests.support import trainer_cases
from tests.support.keras_cases import (
    FEATURES,
    Model,
    Run,
    StormPlusModelMixin,
    StormPlusOptimizer,
    compiled,
    fitted,
    keras,
    keras_distance,
    keras_network,
    plain_keras,
)
from tests.support.trainer_cases import (
    BATCHES,
    ROWS,
    SAMPLES,
    Settings,
    assert_at_average,
    assert_same_states,
    data,
    snapshot,
    untuned_run,
)

from stormplus import Untuned, recalibrate

fit = partial(trainer_cases.fit, "keras")
BATCH_LIST = list(zip(*(part.split(ROWS) for part in data(dtype=torch.float32))))


class Sequential(StormPlusModelMixin, keras.Sequential):
    pass


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_keras_layers_with_dropout_and_statistics(dtype):
    run, plain = fitted(keras_network(dtype=dtype)), plain_keras(keras_network(dtype=dtype))
    assert_same_states(run.states, plain.states)
    assert run.opt.diagnostics() == plain.opt.diagnostics()
    assert int(run.trainer.optimizer.iterations.numpy()) == SAMPLES
    layers = keras_network(dtype=dtype).layers[1:]
    assert_same_states(fitted(Sequential([keras.Input((FEATURES,)), *layers])).states, plain.states)


def test_random_numbers_without_a_seed_generator_are_replayed():
    class Noisy(StormPlusModelMixin, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.noise = []

        def call(self, x, training=False):
            noise = keras.random.normal((FEATURES,))
            if training:
                self.noise.append(noise)
            return self.dense(x + noise)

    model = Noisy()
    model(BATCH_LIST[0][0])
    fitted(model, epochs=1)
    pairs = list(zip(model.noise[1::2], model.noise[2::2]))
    assert len(pairs) == BATCHES - 1
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def test_a_learning_rate_that_keras_changes():
    halve = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch)
    assert fitted(keras_network(), halve).opt.param_groups[0]["lr"] == 0.5


# -- weights and states --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"method": "StormPlus"},
        {"method": "Untuned"},
        {"method": "Untuned", "state_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_a_loaded_model_continues(tmp_path, options):
    """Without a seed generator: Keras itself does not save where those stand."""
    first = fitted(keras_network(seeded=False), epochs=1, **options)
    first.trainer.save(tmp_path / "half.keras")
    loaded = keras.saving.load_model(tmp_path / "half.keras")
    assert type(loaded) is Model
    second = fitted(loaded, epochs=1, first=BATCHES)
    whole = fitted(keras_network(seeded=False), **options)
    assert_same_states(first.states + second.states, whole.states)


@pytest.mark.parametrize("method", ["StormPlus", "Untuned"])
def test_backup_and_restore_continues(tmp_path, method):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup, first = partial(keras.callbacks.BackupAndRestore, tmp_path / "backup"), Run()
    with suppress(KeyboardInterrupt):
        fitted(keras_network(seeded=False), backup(), Stop(), s=Settings(run=first), method=method)
    again = compiled(keras_network(seed=1, seeded=False), method)
    second = fitted(again, backup(), first=BATCHES)
    whole = fitted(keras_network(seeded=False), method=method)
    assert_same_states(first.states + second.states, whole.states)


# -- what is refused -----------------------------------------------------------------------------


def float16():
    model = keras_network(dtype="mixed_float16")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    fitted(model)


def compiled_with(**options):
    model = keras_network()
    model.compile(loss=keras_distance, **options)
    fitted(model)


def constrained():
    x = keras.Input((FEATURES,))
    fitted(Model(x, keras.layers.Dense(1, kernel_constraint="non_neg")(x)))


def unfrozen_after_building():
    model = keras_network()
    model.layers[1].trainable = False
    fitted(model, epochs=1)
    model.layers[1].trainable = True
    fitted(model, epochs=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (float16, r"LossScaleOptimizer.*mixed_bfloat16"),
        (lambda: compiled_with(optimizer="adam"), "got Adam"),
        (lambda: compiled_with(optimizer=StormPlusOptimizer(), jit_compile=True), "jit_compile"),
        (constrained, "has the constraint NonNeg"),
        (unfrozen_after_building, "Unknown variable"),
        (lambda: StormPlusOptimizer(clipnorm=2), "unexpected keyword argument 'clipnorm'"),
        (lambda: StormPlusOptimizer("Untuned", use_ema=True), "unexpected .* 'use_ema'"),
        (lambda: StormPlusOptimizer("Adam"), r"StormPlus, .*Untuned, got 'Adam'"),
        (lambda: StormPlusOptimizer().torch_optimizer, "not built yet"),
        (lambda: StormPlusOptimizer().exclude_from_weight_decay(var_names=["b"]), "all variables"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_wrong_is_refused(wrong, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        wrong()


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="'jax': set the environment variable KERAS_BACKEND"):
        importlib.reload(sys.modules[StormPlusOptimizer.__module__])


# -- Untuned -------------------------------------------------------------------------------------


def test_early_stopping_restores_an_average():
    class Rises(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mark"] = float(epoch)

    stop = keras.callbacks.EarlyStopping(
        monitor="mark", mode="min", patience=5, restore_best_weights=True
    )
    run = fit(None, Rises(), stop, kind=Untuned)
    assert_at_average(snapshot(run.net), untuned_run(dtype=torch.float32), BATCHES)


def test_recalibrate_says_what_to_do_with_keras_layers():
    model = fitted(keras_network(seeded=False), method="Untuned").trainer
    with pytest.raises(TypeError, match=r"call model\(x, training=True\) on some batches"):
        recalibrate(model, [x for x, _ in BATCH_LIST])
