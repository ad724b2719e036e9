"""A run that is cut goes on from its last measurement, with the same numbers."""

import math

import pytest
import torch
from small_network import small
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from stormplus_bench.train import networks
from stormplus_bench.train.estimator import ORDERS, QUANTITIES
from stormplus_bench.train.steppers import AtAverage, Averaged, OneGradient, TwoGradients
from stormplus_bench.train.training import Training, forget, part_file, row_of, share_file

STEPPERS = {
    "SGD momentum": lambda t: OneGradient(SGD(t.model.parameters(), 0.1, momentum=0.9)),
    "Adam": lambda t: OneGradient(Adam(t.model.parameters(), 0.01)),
    "AdaGrad": lambda t: OneGradient(Adagrad(t.model.parameters(), 0.01)),
    "STORM": lambda t: TwoGradients(Storm(t.model.parameters(), 0.1)),
    "STORM+ mean": lambda t: TwoGradients(StormPlus(t.model.parameters(), 0.1, norm="mean")),
    "simplified STORM+": lambda t: TwoGradients(SimplifiedStormPlus(t.model.parameters(), 0.1)),
    "Untuned": lambda t: AtAverage(Untuned(t.model.parameters())),
}


def walk(training, places):
    for target in places:
        training.advance(target)
        training.record()
    return training


@pytest.mark.parametrize("name", STEPPERS)
def test_a_run_that_was_cut_ends_with_the_same_numbers(name, tmp_path):
    workload = small()
    whole = walk(Training(workload, STEPPERS[name], 3), workload.checkpoints)
    part = part_file(tmp_path / "rows.jsonl", ("small", name, 0.1, 3))
    walk(Training(workload, STEPPERS[name], 3), workload.checkpoints[:3]).save(part)
    assert share_file(part).read_text() == "0.5000"
    rest = Training(workload, STEPPERS[name], 3)
    rest.restore(part)
    walk(rest, workload.checkpoints[3:])
    for p, q in zip(whole.model.state_dict().values(), rest.model.state_dict().values()):
        assert torch.equal(p, q)
    whole.curve.pop("seconds"), rest.curve.pop("seconds")
    assert repr(whole.curve) == repr(rest.curve)  # nan is nan
    assert repr(whole.estimator) == repr(rest.estimator)
    forget(part)
    assert not list(part.parent.iterdir())


def test_a_budget_of_samples_gives_every_method_as_many_epochs():
    workload = small()
    one, two = (
        walk(Training(workload, STEPPERS[name], 0), workload.checkpoints)
        for name in ("Adam", "STORM")
    )
    assert one.curve["samples"] == two.curve["samples"] == [0, 2, 4, 8]
    assert (one.evaluations, two.evaluations) == (8, 15)  # the first step takes one gradient
    two.require_whole()


def test_methods_with_names_alike_keep_their_states_apart(tmp_path):
    keys = [("w", m, lr, s) for m in ("STORM", "STORM+") for lr in (1.0, 0.1) for s in (0, 1)]
    assert len({part_file(tmp_path / "rows.jsonl", key) for key in keys}) == len(keys)


def test_a_method_without_a_state_is_run_from_the_start(tmp_path):
    class Averager:
        averaged_model = nn.Linear(1, 1)

        def step(self):
            pass

    part = tmp_path / "rows.parts" / "a.pt"
    training = Training(small(), lambda t: Averaged(SGD(t.model.parameters()), Averager()), 0)
    training.save(part)
    assert not part.exists()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def test_the_estimators_error_is_measured_against_two_epochs():
    workload = small()
    training = walk(Training(workload, STEPPERS["STORM+ mean"], 0), workload.checkpoints)
    model, optimizer = training.model, training.stepper.optimizer
    buffers = [b.clone() for b in model.buffers()]
    epochs = []
    for seed in ORDERS:
        stream = workload.samples(seed)
        epochs.append([])
        for _ in range(5):
            model.zero_grad()
            workload.loss(model, next(stream)).backward()
            epochs[-1].append(flat(p.grad for p in model.parameters()))
    one, two = (torch.stack(gradients).mean(0) for gradients in epochs)
    noise = torch.stack([g @ g for gradients in epochs for g in gradients]).mean() - one @ two
    d = flat(optimizer.state[p]["estimator"] for p in model.parameters())
    seen = {name: values[-1] for name, values in training.estimator.items()}
    assert seen["full_grad_sq"] == pytest.approx(float(one @ two), rel=1e-4)
    assert seen["error_sq"] == pytest.approx(float((d - one) @ (d - two)), rel=1e-4)
    assert seen["batch_error_sq"] == pytest.approx(float(noise), rel=1e-4)
    shown = optimizer.diagnostics()
    assert seen["gain"] == shown["gain"]
    assert seen["step_size"] == pytest.approx(0.1 * shown["step_size"])
    assert seen["estimator_norm"] == pytest.approx(float(d.norm()), rel=1e-5)
    assert math.isnan(training.estimator["error_sq"][0])  # before the first sample there is no d
    # Watching leaves no trace in the run.
    plain = small()
    plain.watches = False
    same = walk(Training(plain, STEPPERS["STORM+ mean"], 0), plain.checkpoints)
    assert all(torch.equal(b, c) for b, c in zip(buffers, same.model.buffers()))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), same.model.parameters()))
    assert set(row_of(training, {"method": "STORM+ mean"})["estimator"]) == set(QUANTITIES)
    assert "estimator" not in row_of(same, {"method": "STORM+ mean"})


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_a_convolution_of_tiny_images_is_a_convolution(size, stride):
    torch.manual_seed(0)
    ours = networks.Conv3x3(3, 5, stride).double()
    x = torch.randn(4, 3, size, size, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 5, -(-size // stride), -(-size // stride), dtype=torch.float64)
    found, expected = [], []
    for out, y in ((found, ours(x)), (expected, nn.Conv2d.forward(ours, x))):
        out += [y, *torch.autograd.grad((weights * y).sum(), (x, ours.weight))]
    for a, b in zip(found, expected):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
