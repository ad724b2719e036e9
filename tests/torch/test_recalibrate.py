"""BatchNorm's running statistics over given batches, against means that are taken by hand."""

import copy

import pytest
import torch
from torch import nn

from stormplus import Untuned, recalibrate
from tests.torch.optimizers import assert_same, noise

DATA = list(noise(4, 6, 3))


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None),
    ).double()  # fmt: skip


class Two(nn.Module):
    """A model with two inputs, and one that it can do without."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x, shift, scale=None):
        return self.net(x + shift if scale is None else scale * (x + shift))


@torch.no_grad()
def by_hand(net):
    """The two layers' means and variances; BatchNorm normalizes by those of each batch."""
    first, norm, second = net[0], net[1], net[4]
    h = [first(x) for x in DATA]
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


def assert_by_hand(net):
    torch.testing.assert_close(statistics(net), by_hand(net), rtol=1e-12, atol=1e-12)


ZERO = torch.zeros(3, dtype=torch.float64)
FORMS = {
    "tensor": (model, lambda x: x),
    "tuple": (model, lambda x: (x, "labels")),
    "list": (model, lambda x: [x, "labels"]),
    "dict": (model, lambda x: {"input": x}),
    "dict in a tuple": (model, lambda x: ({"input": x}, "labels")),
    "two inputs": (Two, lambda x: (x, ZERO, "labels")),
    "by keyword": (Two, lambda x: {"x": x, "shift": ZERO}),
}


@pytest.mark.parametrize("name", FORMS)
def test_statistics_are_means_over_the_batches(name):
    make, form = FORMS[name]
    made = make()
    net = made.net if isinstance(made, Two) else made
    net[1].running_mean.fill_(7.0)
    net[1].num_batches_tracked.fill_(9)
    recalibrate(made, (form(x) for x in DATA))
    assert_by_hand(net)
    assert net[1].num_batches_tracked == len(DATA)


def test_a_function_that_evaluates_a_batch():
    net = model()
    recalibrate(net, range(len(DATA)), evaluate=lambda i: net(DATA[i]))
    assert_by_hand(net)


def test_nothing_but_the_statistics_changes():
    net = model().eval()
    net[3].train()  # modes need not agree
    modes = [m.training for m in net.modules()]
    weights = copy.deepcopy(list(net.parameters()))
    before = torch.get_rng_state()
    recalibrate(net, DATA)
    assert [m.training for m in net.modules()] == modes
    assert (net[1].momentum, net[5].momentum) == (0.3, None)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights))
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("batches", "error"),
    [([], ValueError), ([DATA[0], torch.zeros(2, 99, dtype=torch.float64)], RuntimeError)],
    ids=["no batches", "a batch that fails"],
)
def test_a_failure_leaves_the_model_as_it_was(batches, error):
    net = model().train()
    net(DATA[0])
    before = dict(copy.deepcopy(net.state_dict()))
    with pytest.raises(error):
        recalibrate(net, iter(batches))
    assert_same(dict(net.state_dict()), before)
    assert net[1].momentum == 0.3
    assert all(m.training for m in net.modules())


@pytest.mark.parametrize(
    "net", [nn.LayerNorm(2), nn.BatchNorm1d(3, track_running_stats=False)], ids=str
)
def test_a_model_without_statistics_draws_no_batch(net):
    recalibrate(net, map(pytest.fail, ["a batch was drawn"]))


def test_after_eval_they_are_the_statistics_of_the_average():
    net = model()
    opt = Untuned(net.parameters())
    for x in DATA * 2:
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    opt.eval()
    recalibrate(net, DATA)
    assert_by_hand(net)
    at_average = statistics(net)
    opt.train()
    recalibrate(net, DATA)
    assert not torch.allclose(statistics(net)[0], at_average[0], rtol=1e-6)
