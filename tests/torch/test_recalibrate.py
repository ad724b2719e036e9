"""BatchNorm's running statistics over given batches, against means that are taken by hand."""

import copy

import pytest
import torch
from torch import nn

from stormplus import Untuned, recalibrate


def batches(count=4, rows=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 3, generator=draw, dtype=torch.float64) for _ in range(count)]


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None),
    ).double()  # fmt: skip


def by_hand(net, data):
    """The two layers' means and variances; BatchNorm normalizes by those of each batch."""
    first, norm, second = net[0], net[1], net[4]
    h = [first(x) for x in data]
    scaled = [(a - a.mean(0)) / (a.var(0, correction=0) + norm.eps).sqrt() for a in h]
    between = [torch.relu(norm.weight * a + norm.bias) for a in scaled]
    out = [second(a) for a in between]  # dropout is off
    return [
        torch.stack([f(a) for a in layer]).mean(0)
        for layer in (h, out)
        for f in (lambda a: a.mean(0), lambda a: a.var(0, correction=1))
    ]


def statistics(net):
    return [t.clone() for i in (1, 5) for t in (net[i].running_mean, net[i].running_var)]


def assert_by_hand(net, data):
    with torch.no_grad():
        for found, expected in zip(statistics(net), by_hand(net, data), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def shaken(net):
    for i in (1, 5):
        net[i].running_mean.fill_(7.0)
        net[i].num_batches_tracked.fill_(9)
    return net


class Two(nn.Module):
    """A model with two inputs, and one that it can do without."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x, shift, scale=None):
        return self.net(x + shift if scale is None else scale * (x + shift))


ZERO = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (model, lambda x: x),
        (model, lambda x: (x, "labels")),
        (model, lambda x: [x, "labels"]),
        (model, lambda x: {"input": x}),
        (model, lambda x: ({"input": x}, "labels")),
        (Two, lambda x: (x, ZERO, "labels")),
        (Two, lambda x: {"x": x, "shift": ZERO}),
    ],
    ids=["tensor", "tuple", "list", "dict", "dict in a tuple", "two inputs", "by keyword"],
)
def test_statistics_are_means_over_the_batches(make, form):
    made, data = make(), batches()
    net = shaken(made.net if isinstance(made, Two) else made)
    recalibrate(made, (form(x) for x in data))
    assert_by_hand(net, data)
    assert net[1].num_batches_tracked == len(data)


def test_an_evaluation_of_ones_own():
    net, data = model(), batches()
    recalibrate(net, range(len(data)), evaluate=lambda i: net(data[i]))
    assert_by_hand(net, data)


def test_modes_momenta_parameters_and_random_numbers_stay():
    net = model()
    net.eval()
    net[3].train()  # modes need not agree
    modes = [m.training for m in net.modules()]
    weights = copy.deepcopy(list(net.parameters()))
    before = torch.get_rng_state()
    recalibrate(net, batches())
    assert [m.training for m in net.modules()] == modes
    assert (net[1].momentum, net[5].momentum) == (0.3, None)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights))
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_as_torch_does_without_dropout():
    net = model()
    net[3].p = 0.0
    other = copy.deepcopy(net)
    torch.optim.swa_utils.update_bn(batches(), other)
    recalibrate(net, batches())
    for found, expected in zip(statistics(net), statistics(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_failure_leaves_the_statistics_as_they_were():
    net = shaken(model()).train()
    before = statistics(net)
    with pytest.raises(ValueError, match=r"got no batches.*pass some of the training data"):
        recalibrate(net, iter(()))
    with pytest.raises(RuntimeError):
        recalibrate(net, [*batches(1), torch.zeros(2, 99, dtype=torch.float64)])
    assert all(torch.equal(a, b) for a, b in zip(statistics(net), before))
    assert int(net[1].num_batches_tracked) == 9
    assert net[1].momentum == 0.3
    assert all(m.training for m in net.modules())


def test_a_model_without_statistics_is_left_alone():
    def never():
        raise AssertionError("nothing is to be drawn")
        yield

    recalibrate(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), never())
    recalibrate(nn.BatchNorm1d(3, track_running_stats=False), never())


def test_at_the_average_they_are_the_averages():
    net, data = model(), batches(8)
    opt = Untuned(net.parameters())
    for x in data:
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    opt.eval()
    recalibrate(net, data)
    assert_by_hand(net, data)
    at_average = statistics(net)
    opt.train()
    recalibrate(net, data)
    assert not torch.allclose(statistics(net)[0], at_average[0], rtol=1e-6)
