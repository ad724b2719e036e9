"""Keras 3 on torch: runs that are saved and go on, and what is refused."""

import importlib
import sys

import pytest
from keras_runs import (
    EPOCHS,
    SAMPLES,
    KerasStorm,
    Model,
    cross_entropy,
    fitted,
    keras,
    keras_network,
)
from plain_loop import CLASSES, FEATURES, assert_same_runs

# Keras's own: it asks torch for a tensor's array in the way of NumPy 1
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("way", ["model", "weights"])
def test_saving_and_loading_go_on_bit_by_bit(tmp_path, way):
    whole = fitted(keras_network(seeded=False))
    first = keras_network(seeded=False)
    start = fitted(first, epochs=1)
    if way == "model":
        first.save(tmp_path / "half.keras")
        second = keras.saving.load_model(tmp_path / "half.keras")
        assert type(second) is Model
    else:
        first.save_weights(tmp_path / "half.weights.h5")
        second = keras_network(seed=1, seeded=False)
        second.compile(optimizer=KerasStorm(), loss=cross_entropy)
        second.optimizer.build(second.trainable_variables)
        second.load_weights(tmp_path / "half.weights.h5")
    rest = fitted(second, epochs=1, first=len(start))
    assert second.optimizer.torch_optimizer.diagnostics()["grad_evaluations"] == 2 * SAMPLES - 1
    assert_same_runs(start + rest, whole)


def test_backup_and_restore_goes_on_bit_by_bit(tmp_path):
    whole = fitted(keras_network(seeded=False))

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    first = keras_network(seeded=False)
    first.compile(optimizer=KerasStorm(), loss=cross_entropy)
    with pytest.raises(KeyboardInterrupt):
        fitted(first, callbacks=[backup, Stop()])
    second = keras_network(seed=1, seeded=False)
    second.compile(optimizer=KerasStorm(), loss=cross_entropy)
    again = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    rest = fitted(second, callbacks=[again], first=SAMPLES // EPOCHS)
    half = SAMPLES // EPOCHS
    assert_same_runs(rest, whole[half:])


def test_another_methods_state_is_refused(tmp_path):
    first = keras_network()
    fitted(first, epochs=1)
    first.save_weights(tmp_path / "half.weights.h5")
    second = keras_network()
    second.compile(optimizer=KerasStorm("SimplifiedStormPlus"), loss=cross_entropy)
    second.optimizer.build(second.trainable_variables)
    with pytest.raises(ValueError, match="saved with rule"):
        second.load_weights(tmp_path / "half.weights.h5")


def test_weights_set_from_outside_restart_the_estimator():
    model = keras_network()
    fitted(model, epochs=1)
    before = model.optimizer.torch_optimizer.diagnostics()["grad_evaluations"]
    model.set_weights(keras_network(seed=1).get_weights())
    fitted(model, epochs=1)
    after = model.optimizer.torch_optimizer.diagnostics()["grad_evaluations"]
    assert after - before == 2 * (SAMPLES // EPOCHS) - 1


class Clip(keras.callbacks.Callback):
    """Clips the weights after every batch, as long as it is on."""

    on = True

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.model.trainable_variables if self.on else ():
            variable.assign(keras.ops.clip(variable, -0.5, 0.5))


def test_writing_to_the_weights_at_every_batch_is_refused():
    model, clip = keras_network(), Clip()
    with pytest.raises(RuntimeError, match=r"writes to the parameters at every batch.*Remove"):
        fitted(model, callbacks=[clip])
    clip.on = False
    before = model.optimizer.torch_optimizer.diagnostics()["grad_evaluations"]
    fitted(model, epochs=1, callbacks=[clip])  # goes on once the cause is gone
    after = model.optimizer.torch_optimizer.diagnostics()["grad_evaluations"]
    assert after - before == 2 * (SAMPLES // EPOCHS) - 1


def test_constraints_of_layers_are_refused():
    x = keras.Input((FEATURES,))
    dense = keras.layers.Dense(CLASSES, kernel_constraint=keras.constraints.NonNeg(), name="bound")
    with pytest.raises(ValueError, match=r"bound/kernel has the constraint NonNeg.*regularizer"):
        fitted(Model(x, dense(x)))
    model = Model(x, dense(x))
    dense.trainable = False  # no step touches it
    model = Model(x, keras.layers.Dense(CLASSES)(model(x)))
    assert len(fitted(model, epochs=1)) == SAMPLES // EPOCHS


def test_exclude_from_weight_decay_is_refused():
    optimizer = KerasStorm(weight_decay=0.1)
    with pytest.raises(RuntimeError, match=r"var_names=\['bias'\].*parameter groups"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


def test_mixed_float16_is_refused():
    model = keras_network(dtype="mixed_float16")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    model.compile(optimizer=KerasStorm(), loss=cross_entropy)
    with pytest.raises(TypeError, match=r"LossScaleOptimizer.*mixed_bfloat16"):
        fitted(model)


def test_a_model_without_the_training_step_is_refused():
    model = keras_network(kind=keras.Model)
    with pytest.raises(RuntimeError, match=r"class Model\(StormTraining, keras.Model\)"):
        fitted(model)
    model = keras_network()
    model.compile(optimizer="adam", loss=cross_entropy)
    with pytest.raises(TypeError, match="got Adam"):
        fitted(model)


def test_compiling_the_training_step_is_refused():
    model = keras_network()
    model.compile(optimizer=KerasStorm(), loss=cross_entropy, jit_compile=True)
    with pytest.raises(ValueError, match="fused=True"):
        fitted(model)


@pytest.mark.parametrize(
    "option",
    [
        {"clipnorm": 1.0},
        {"clipvalue": 1.0},
        {"global_clipnorm": 1.0},
        {"use_ema": True},
        {"gradient_accumulation_steps": 2},
        {"loss_scale_factor": 2.0},
    ],
)
def test_keras_own_options_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.*is not supported: use"):
        KerasStorm(**option)


def test_wrong_names_and_layers_that_join_are_refused():
    with pytest.raises(ValueError, match="got 'Adam'"):
        KerasStorm("Adam")
    with pytest.raises(RuntimeError, match="not built yet"):
        _ = KerasStorm().torch_optimizer
    model = keras_network()
    model.layers[1].trainable = False
    fitted(model, epochs=1)
    model.layers[1].trainable = True
    with pytest.raises(ValueError, match="Unknown variable"):
        fitted(model, epochs=1)


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="'jax': set the environment variable KERAS_BACKEND"):
        importlib.reload(sys.modules[KerasStorm.__module__])


@pytest.mark.parametrize("absent", ["keras", "keras.src.random.seed_generator"])
def test_a_missing_package_is_named(monkeypatch, absent):
    name = KerasStorm.__module__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ModuleNotFoundError, match=r"KERAS_BACKEND.*pip install 'stormplus\[keras"):
        importlib.import_module(name)
