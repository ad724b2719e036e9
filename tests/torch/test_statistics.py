"""Modules with running statistics: they move once a sample, at the new point."""

import copy

import pytest
import torch
from torch import nn

from stormplus import StormPlus, same_sample

X = torch.randn(12, 16, 6, generator=torch.Generator().manual_seed(0))


class Drift(nn.Module):
    """A running statistic of one's own, that puts a new tensor in the buffer's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("unused", None)

    def forward(self, x):
        if self.training:
            self.level = 0.9 * self.level + 0.1 * x.detach().mean()
        return x


def network(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Tanh(), nn.Dropout(0.3),
        Drift(), nn.Linear(8, 1),
    )  # fmt: skip


def backward(model, opt, x):
    opt.zero_grad()
    loss = torch.log1p(model(x).square()).mean()
    loss.backward()
    return loss


def train(model, way, samples=X):
    opt = StormPlus(model.parameters(), lr=0.3)
    for i, x in enumerate(samples):
        torch.manual_seed(i)
        if way == "closure":
            opt.step(same_sample(opt, model)(lambda: backward(model, opt, x)))
        elif way == "context":
            with same_sample(opt, model):
                opt.step(lambda: backward(model, opt, x))
        elif way == "halves":
            with same_sample(opt, model):
                if opt.started:
                    backward(model, opt, x)
                    opt.move()
                backward(model, opt, x)
                opt.estimate()
        else:
            opt.step(lambda: backward(model, opt, x))
    return opt


def by_hand(model, samples=X):
    """What should happen: the statistics see each sample once, at x_{t+1}."""
    opt = StormPlus(model.parameters(), lr=0.3, replay_rng=False)
    for i, x in enumerate(samples):
        if opt.started:
            twin = copy.deepcopy(model)  # its statistics are thrown away
            torch.manual_seed(i)
            torch.log1p(twin(x).square()).mean().backward()
            for p, q in zip(model.parameters(), twin.parameters()):
                p.grad = q.grad
            opt.move()
        torch.manual_seed(i)
        backward(model, opt, x)
        opt.estimate()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("way", ["closure", "context", "halves"])
def test_statistics_and_weights_equal_the_run_by_hand(way, momentum):
    model, expected = network(momentum), network(momentum)
    train(model, way)
    by_hand(expected)
    assert model[1].num_batches_tracked == len(X)
    for (name, a), b in zip(model.state_dict().items(), expected.state_dict().values()):
        assert torch.equal(a, b), name
    assert model.training


def test_without_it_they_move_twice():
    model = network()
    train(model, "none")
    assert model[1].num_batches_tracked == 2 * len(X) - 1


def test_buffers_are_the_same_objects_afterwards():
    model = network()
    mean = model[1].running_mean
    train(model, "halves")
    assert model[1].running_mean is mean


def test_spectral_norm_power_iteration_advances_once():
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
    expected = copy.deepcopy(model)
    x = X[0]
    opt = StormPlus(model.parameters(), lr=0.0)
    backward(model, opt, x)
    opt.estimate()
    for _ in range(3):
        with same_sample(opt, model):
            opt.step(lambda: backward(model, opt, x))
    for _ in range(4):  # one forward pass a sample
        expected(x)
    for (name, a), b in zip(model.named_buffers(), expected.buffers()):
        torch.testing.assert_close(a, b, msg=name)


def test_evaluation_mode_is_left_alone():
    model = network().eval()
    before = {k: v.clone() for k, v in model.named_buffers()}
    train(model, "closure")
    assert not model.training
    assert all(torch.equal(v, before[k]) for k, v in model.named_buffers())


def test_a_failure_inside_leaves_the_optimizer_clean():
    model = network()
    opt = StormPlus(model.parameters())
    with pytest.raises(ZeroDivisionError), same_sample(opt, model):
        raise ZeroDivisionError
    assert opt._samples == []


def test_first_evaluation_that_fails_leaves_the_statistics_alone():
    model = network()
    opt = train(model, "closure", X[:3])

    def fails():
        backward(model, opt, X[3])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(same_sample(opt, model)(fails))
    assert model[1].num_batches_tracked == 3


@pytest.mark.parametrize("at", [0, 2])  # the very first sample, and one with two evaluations
@pytest.mark.parametrize("way", ["closure", "context", "halves"])
def test_sample_that_is_not_finite_is_not_seen_by_the_statistics(way, at):
    model = network()
    opt = train(model, way, X[:at])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    bad = X[at].clone()
    bad[0, 0] = float("nan")

    def bad_sample():
        if way == "closure":
            opt.step(same_sample(opt, model)(lambda: backward(model, opt, bad)))
        else:
            with same_sample(opt, model):
                backward(model, opt, bad)
                opt.move() if opt.started else opt.estimate()

    with pytest.raises(FloatingPointError, match="nothing has moved"):
        bad_sample()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("way", ["closure", "same context", "new context"])
def test_second_evaluation_tried_again_is_the_same_sample(way):
    # An inf in the second evaluation: statistics and masks are those of one clean evaluation.
    model, expected = network(), network()
    opt = train(model, "closure", X[:3])
    train(expected, "closure", X[:4])
    torch.manual_seed(3)
    calls = []

    def evaluate():
        calls.append(None)
        opt.zero_grad()
        loss = torch.log1p(model(X[3]).square()).mean()
        (loss * (float("inf") if len(calls) == 2 else 1)).backward()
        return loss

    def complete():
        evaluate()
        opt.estimate()

    if way == "closure":
        with pytest.raises(FloatingPointError):
            opt.step(same_sample(opt, model)(evaluate))
    else:
        with same_sample(opt, model):
            evaluate()
            opt.move()
            evaluate()
            with pytest.raises(FloatingPointError, match="pending"):
                opt.estimate()
            if way == "same context":
                complete()
    if way != "same context":
        torch.rand(5)  # the stream goes on elsewhere meanwhile
        with same_sample(opt, model):
            complete()
    for (name, a), b in zip(model.state_dict().items(), expected.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_expanded_and_missing_buffers():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 1)
            self.register_buffer("ids", torch.arange(6.0).expand(16, 6))
            self.register_buffer("seen", None)

        def forward(self, x):
            self.seen = torch.ones(()) if self.seen is None else self.seen + 1
            return self.linear(x + self.ids)

    model = Positions()
    train(model, "closure", X[:5])
    assert model.seen == 5


def test_halves_begun_outside_are_not_rewound():
    p = nn.Parameter(torch.ones(2))
    opt = StormPlus([p])
    p.grad = torch.ones(2)
    opt.estimate()
    opt.move()
    before = torch.get_rng_state()
    with same_sample(opt):
        assert torch.equal(torch.get_rng_state(), before)
        opt.estimate()


def test_no_model_means_random_numbers_only():
    p, drawn = nn.Parameter(torch.ones(2)), []
    opt = StormPlus([p])
    for _ in range(2):
        with same_sample(opt):
            for half in (opt.move, opt.estimate) if opt.started else (opt.estimate,):
                drawn.append(torch.rand(1))
                p.grad = torch.ones(2)
                half()
    assert torch.equal(drawn[1], drawn[2])
