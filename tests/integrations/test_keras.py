"""Keras 3 on torch: what only it does. What trainers share is in `test_trainers.py`."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

if importlib.util.find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)

from keras_cases import (
    FEATURES,
    ClosureTraining,
    KerasOptimizer,
    Model,
    compiled,
    fitted,
    inside,
    keras,
    keras_distance,
    keras_network,
    plain_keras,
    untuned,
)
from torch import nn
from trainer_cases import (
    BATCHES,
    EPOCHS,
    ROWS,
    SAMPLES,
    assert_at_average,
    assert_same_states,
    data,
    distance,
    snapshot,
    untuned_run,
)

from stormplus import SimplifiedStormPlus, StormPlus, recalibrate, same_sample

BATCH_LIST = list(zip(*(part.split(ROWS) for part in data(dtype=torch.float32))))


class Sequential(ClosureTraining, keras.Sequential):
    pass


def test_keras_layers_with_dropout_and_statistics():
    run, plain = fitted(keras_network()), plain_keras(keras_network())
    assert_same_states(run.states, plain.states)
    assert run.opt.diagnostics() == plain.opt.diagnostics()
    assert run.opt.grad_evaluations == 2 * SAMPLES - 1
    assert int(run.trainer.optimizer.iterations.numpy()) == SAMPLES
    sequential = Sequential([keras.Input((FEATURES,)), *keras_network().layers[1:]])
    assert_same_states(fitted(sequential).states, plain.states)


def test_mixed_bfloat16():
    run = fitted(keras_network(dtype="mixed_bfloat16"))
    assert_same_states(run.states, plain_keras(keras_network(dtype="mixed_bfloat16")).states)
    assert run.states[-1]["0"].dtype == torch.float32


def test_each_batch_is_evaluated_twice_and_counted_once():
    model, calls = keras_network(), []
    model.compile(
        optimizer=KerasOptimizer(),
        loss=lambda y, out: calls.append(1) or keras_distance(y, out),
    )
    seeds = [layer.seed_generator.state for layer in model.layers[5:6]]
    before = [v.numpy()[1] for v in seeds]
    fitted(model)
    built = 1  # Keras calls the loss once with symbols
    assert len(calls) - built == 2 * SAMPLES - 1
    assert [v.numpy()[1] for v in seeds] == [count + SAMPLES for count in before]


def test_keras_layers_against_torch_layers():
    # To rounding: Keras multiplies matrices in float32 whatever the dtype, and sums otherwise.
    model = keras_network(dropout=0.0)
    dense, norm, last = model.layers[1], model.layers[2], model.layers[6]
    torch_model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, eps=norm.epsilon, momentum=1 - norm.momentum),
        nn.Tanh(), nn.Linear(8, 1),
    )  # fmt: skip
    with torch.no_grad():
        for mine, theirs in ((dense, torch_model[0]), (last, torch_model[3])):
            theirs.weight.copy_(mine.kernel.value.T)
            theirs.bias.copy_(mine.bias.value)
    states = fitted(model).states
    opt = StormPlus(torch_model.parameters())
    for (x, y), state in zip(BATCH_LIST * EPOCHS, states, strict=True):

        def closure():
            opt.zero_grad()
            loss = distance(torch_model(x), y)
            loss.backward()
            return loss

        opt.step(same_sample(opt, torch_model)(closure))
        for mine, theirs in (("0", torch_model[0].weight.T), ("4", torch_model[1].running_mean)):
            torch.testing.assert_close(state[mine], theirs, rtol=1e-4, atol=1e-5)


def test_random_numbers_without_a_seed_generator_are_replayed():
    class Noisy(ClosureTraining, keras.Model):
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


def test_the_loss_reported_is_the_first_evaluations():
    model, other = compiled(keras_network()), keras_network()
    x, y = BATCH_LIST[0]
    for i in range(2):
        torch.manual_seed(i)
        value = model.train_on_batch(x, y)
        torch.manual_seed(i)
        expected = keras_distance(y, other(x, training=True)).item()
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        other.set_weights(model.get_weights())
        model.reset_metrics()


def test_schedules_of_keras_and_the_other_optimizers():
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, SAMPLES, 0.0)
    opt = fitted(
        keras_network(), learning_rate=schedule, method="SimplifiedStormPlus", norm="mean"
    ).opt
    assert type(opt) is SimplifiedStormPlus
    assert opt.param_groups[0]["lr"] == pytest.approx(1 / SAMPLES)
    halve = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch)
    assert fitted(keras_network(), callbacks=[halve]).opt.param_groups[0]["lr"] == 0.5


# -- weights and states --------------------------------------------------------------------------


def test_another_methods_state_is_refused(tmp_path):
    fitted(keras_network(), epochs=1).trainer.save_weights(tmp_path / "half.weights.h5")
    second = compiled(keras_network(), "SimplifiedStormPlus")
    second.optimizer.build(second.trainable_variables)
    with pytest.raises(ValueError, match="saved with rule"):
        second.load_weights(tmp_path / "half.weights.h5")


def test_weights_set_from_outside_restart_the_estimator():
    model = keras_network()
    opt = fitted(model, epochs=1).opt
    model.set_weights(keras_network(seed=1).get_weights())
    fitted(model, epochs=1)
    assert opt.grad_evaluations == 2 * (2 * BATCHES - 1)


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
    opt = model.optimizer.torch_optimizer
    before = opt.grad_evaluations
    fitted(model, epochs=1, callbacks=[clip])  # goes on once the cause is gone
    assert opt.grad_evaluations - before == 2 * BATCHES - 1


# -- what is refused -----------------------------------------------------------------------------


def test_constraints_of_layers_are_refused():
    x = keras.Input((FEATURES,))
    dense = keras.layers.Dense(1, kernel_constraint=keras.constraints.NonNeg(), name="bound")
    with pytest.raises(ValueError, match=r"bound/kernel has the constraint NonNeg.*regularizer"):
        fitted(Model(x, dense(x)))
    model = Model(x, dense(x))
    dense.trainable = False  # no step touches it
    model = Model(x, keras.layers.Dense(1)(model(x)))
    assert len(fitted(model, epochs=1).states) == BATCHES


def test_exclude_from_weight_decay_is_refused():
    optimizer = KerasOptimizer(weight_decay=0.1)
    with pytest.raises(RuntimeError, match=r"var_names=\['bias'\].*parameter groups"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


def test_mixed_float16_is_refused():
    model = keras_network(dtype="mixed_float16")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(TypeError, match=r"LossScaleOptimizer.*mixed_bfloat16"):
        fitted(compiled(model))


def test_another_optimizer_is_refused():
    model = keras_network()
    model.compile(optimizer="adam", loss=keras_distance)
    with pytest.raises(TypeError, match="got Adam"):
        fitted(model)


def test_compiling_the_training_step_is_refused():
    model = keras_network()
    model.compile(optimizer=KerasOptimizer(), loss=keras_distance, jit_compile=True)
    with pytest.raises(ValueError, match="fused=True"):
        fitted(model)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("clipnorm", 1.0),
        ("clipvalue", 1.0),
        ("global_clipnorm", 1.0),
        ("use_ema", True),
        ("gradient_accumulation_steps", 2),
        ("loss_scale_factor", 2.0),
    ],
)
def test_keras_own_options_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}=.*is not supported: use"):
        KerasOptimizer(**{option: value})


@pytest.mark.parametrize("method", ["Adam", "PairedOptimizer"])
def test_wrong_names_are_refused(method):
    with pytest.raises(ValueError, match=f"StormPlus, .*Untuned, got '{method}'"):
        KerasOptimizer(method)


def test_layers_that_join_are_refused():
    with pytest.raises(RuntimeError, match="not built yet"):
        _ = KerasOptimizer().torch_optimizer
    model = keras_network()
    model.layers[1].trainable = False
    fitted(model, epochs=1)
    model.layers[1].trainable = True
    with pytest.raises(ValueError, match="Unknown variable"):
        fitted(model, epochs=1)


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="'jax': set the environment variable KERAS_BACKEND"):
        importlib.reload(sys.modules[KerasOptimizer.__module__])


def test_a_missing_backend_is_named(monkeypatch):
    name = KerasOptimizer.__module__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "keras.src.random.seed_generator", None)
    with pytest.raises(ModuleNotFoundError, match=r"KERAS_BACKEND.*pip install 'stormplus\[keras"):
        importlib.import_module(name)


# -- Untuned: the average, and no learning rate --------------------------------------------------


def test_a_learning_rate_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match=r"lr=0.001 is ignored: Untuned .*pass 1.0") as told:
        optimizer = KerasOptimizer("Untuned", learning_rate=0.001)
    assert len([w for w in told if "is ignored" in str(w.message)]) == 1
    assert optimizer.get_config()["learning_rate"] == 1.0
    model = keras_network()
    model.compile(optimizer=optimizer, loss=keras_distance)
    opt = fitted(model, epochs=1).opt
    assert opt.param_groups[0]["lr"] == 1.0


def test_a_schedule_multiplies_the_steps():
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, SAMPLES, 0.0)
    opt = fitted(keras_network(), method="Untuned", learning_rate=schedule).opt
    assert opt.param_groups[0]["lr"] == pytest.approx(1 / SAMPLES)


def test_the_whole_model_is_saved_at_the_average_and_goes_on_from_the_iterate(tmp_path):
    def network():
        return keras_network(seeded=False)

    whole = fitted(network(), method="Untuned")
    first = fitted(network(), epochs=1, method="Untuned")
    first.trainer.save(tmp_path / "half.keras")
    again = keras.saving.load_model(tmp_path / "half.keras")
    assert again.optimizer.torch_optimizer.at_average
    for mine, theirs in zip(again.get_weights(), first.trainer.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    second = fitted(again, epochs=1, first=BATCHES)
    assert_same_states(first.states + second.states, whole.states)


def test_early_stopping_restores_an_average_and_training_begins_anew_from_it(tmp_path):
    class Rises(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mark"] = float(epoch)

    stop = keras.callbacks.EarlyStopping(
        monitor="mark", mode="min", patience=5, restore_best_weights=True
    )
    run, plain = untuned(tmp_path, callbacks=[Rises(), stop]), untuned_run(dtype=torch.float32)
    best = plain.averages[BATCHES - 1], plain.states[BATCHES - 1]
    assert_at_average(snapshot(run.net), *best)
    with pytest.warns(UserWarning, match="without the state of Untuned: it begins anew"):
        untuned(tmp_path, epochs=1, model=run.trainer)
    assert run.opt.diagnostics()["step"] == BATCHES


@pytest.mark.parametrize("way", ["predict", "predict_on_batch", "test_on_batch", "evaluate"])
def test_whoever_looks_sees_the_average_and_disturbs_nothing(tmp_path, way):
    model, (x, y) = inside(), BATCH_LIST[0]
    net = model.inside.module

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            args = (x, y) if way in ("evaluate", "test_on_batch") else (x,)
            quiet = {} if way.endswith("batch") else {"verbose": 0}
            getattr(self.model, way)(*args, **quiet)
            seen.append(snapshot(net))

    seen, plain = [], untuned_run(epochs=1, dtype=torch.float32)
    run = untuned(tmp_path, epochs=1, model=model, callbacks=[Looks()])
    assert_same_states(run.states, plain.states)
    assert_at_average(seen[-1], plain.averages[-1], plain.states[-1])


def test_statistics_of_the_average_by_batches_in_training_mode():
    """`recalibrate` is for torch's layers, and says what to do instead."""
    model = fitted(keras_network(seeded=False), method="Untuned").trainer
    norm = next(m for m in model.layers if isinstance(m, keras.layers.BatchNormalization))
    before = model.get_weights()
    with pytest.raises(TypeError, match=r"call model\(x, training=True\) on some batches"):
        recalibrate(model, [x for x, _ in BATCH_LIST])
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    x = data(dtype=torch.float32)[0]
    inputs = keras.Model(model.inputs, norm.input)(x)
    with torch.no_grad():
        for _ in range(3000):  # the layer's momentum is 0.99
            model(x, training=True)
    np.testing.assert_allclose(
        norm.moving_variance.numpy(), inputs.var(0, correction=0).detach().numpy(), rtol=1e-4
    )
