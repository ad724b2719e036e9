"""Keras 3 on torch: the model's run is the plain loop's, step by step."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from keras_runs import (
    EPOCHS,
    SAMPLES,
    KerasStorm,
    StormTraining,
    TorchInside,
    cross_entropy,
    fitted,
    keras,
    keras_network,
    plain_keras,
)
from plain_loop import (
    BATCH,
    CLASSES,
    FEATURES,
    assert_same_runs,
    batches,
    data,
    network,
    plain_run,
    snapshot,
)
from torch import nn
from torch.nn import functional as F

from stormplus import SimplifiedStormPlus, StormPlus, same_sample

# Keras's own: it asks torch for a tensor's array in the way of NumPy 1
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_run_is_the_plain_torch_loops():
    model = TorchInside()
    run = fitted(model, lambda: snapshot(model.inside.module), learning_rate=0.5)
    plain_model = network()
    plain, opt = plain_run(
        plain_model, batches(EPOCHS), each=lambda i, _: torch.manual_seed(i), lr=0.5
    )
    assert_same_runs(run, plain)
    assert model.inside.module.evaluations == plain_model.evaluations == 2 * SAMPLES - 1
    assert model.optimizer.torch_optimizer.diagnostics() == opt.diagnostics()
    assert int(model.optimizer.iterations.numpy()) == SAMPLES


def test_keras_layers_with_dropout_and_statistics():
    model, other = keras_network(), keras_network()
    run = fitted(model)
    plain, evaluations, opt = plain_keras(other)
    assert_same_runs(run, plain)
    assert evaluations == 2 * SAMPLES - 1
    assert model.optimizer.torch_optimizer.diagnostics() == opt.diagnostics()


class Sequential(StormTraining, keras.Sequential):
    pass


def test_sequential_models():
    model, other = keras_network(), keras_network()
    run = fitted(Sequential([keras.Input((FEATURES,)), *model.layers[1:]]))
    assert_same_runs(run, plain_keras(other)[0])


def test_each_batch_is_evaluated_twice_and_counted_once():
    model = keras_network()
    calls = []
    model.compile(
        optimizer=KerasStorm(),
        loss=lambda y, out: calls.append(1) or cross_entropy(y, out),
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
        nn.Tanh(), nn.Linear(8, CLASSES),
    )  # fmt: skip
    with torch.no_grad():
        for mine, theirs in ((dense, torch_model[0]), (last, torch_model[3])):
            theirs.weight.copy_(mine.kernel.value.T)
            theirs.bias.copy_(mine.bias.value)
    run = fitted(model)
    opt = StormPlus(torch_model.parameters())
    for i, (x, y) in enumerate(batches(EPOCHS)):

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(torch_model(x), y)
            loss.backward()
            return loss

        opt.step(same_sample(opt, torch_model)(closure))
        kernel, mean = run[i]["0"], run[i]["4"]
        torch.testing.assert_close(kernel, torch_model[0].weight.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mean, torch_model[1].running_mean, rtol=1e-4, atol=1e-5)


def test_random_numbers_without_a_seed_generator_are_replayed():
    class Noisy(StormTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES)
            self.noise = []

        def call(self, x, training=False):
            noise = keras.random.normal((FEATURES,))
            if training:
                self.noise.append(noise)
            return self.dense(x + noise)

    model = Noisy()
    model(data()[0][:BATCH])
    fitted(model, epochs=1)
    pairs = list(zip(model.noise[1::2], model.noise[2::2]))
    assert len(pairs) == SAMPLES // EPOCHS - 1
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def test_the_loss_reported_is_the_first_evaluations():
    model, other = keras_network(), keras_network()
    model.compile(optimizer=KerasStorm(), loss=cross_entropy)
    x, y = batches()[0]
    for i in range(2):
        torch.manual_seed(i)
        value = model.train_on_batch(x, y)
        torch.manual_seed(i)
        expected = cross_entropy(y, other(x, training=True)).item()
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        other.set_weights(model.get_weights())
        model.reset_metrics()


def test_schedules_and_the_other_optimizers():
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, SAMPLES, 0.0)
    model = keras_network()
    fitted(model, learning_rate=schedule, method="SimplifiedStormPlus", norm="mean")
    opt = model.optimizer.torch_optimizer
    assert type(opt) is SimplifiedStormPlus
    assert opt.param_groups[0]["lr"] == pytest.approx(1 / SAMPLES)

    model = keras_network()
    halve = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch)
    fitted(model, callbacks=[halve])
    assert model.optimizer.torch_optimizer.param_groups[0]["lr"] == 0.5


# Without a seed generator: Keras itself does not save where those stand.


def test_mixed_bfloat16():
    model, other = (keras_network(dtype="mixed_bfloat16") for _ in range(2))
    run = fitted(model)
    plain, _, _ = plain_keras(other)
    assert_same_runs(run, plain)
    assert run[-1]["0"].dtype == torch.float32


@pytest.mark.long  # a process of its own imports everything anew
def test_the_example_runs():
    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "keras_model.py"), "--epochs", "2"],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    assert "44 batches, 87 evaluations" in out
