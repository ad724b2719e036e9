"""Accumulation, clipping, compiled and functional models, tied weights, recomputation."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stormplus import StormPlus, minimize, same_sample

DATA = torch.Generator().manual_seed(0)
X = torch.randn(15, 32, 6, generator=DATA, dtype=torch.float64)
Y = torch.randn(15, 32, 1, generator=DATA, dtype=torch.float64)


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    ).double()  # fmt: skip


def loss_of(model, x, y):
    return F.smooth_l1_loss(model(x), y)


def train(model, backward, lr=0.3, **options):
    """`backward(x, y)` fills the gradients; returns the optimizer."""
    opt = StormPlus(model.parameters(), lr=lr, **options)
    calls = []

    for i, (x, y) in enumerate(zip(X, Y)):

        def closure():
            calls.append(None)
            opt.zero_grad()
            return backward(x, y)

        torch.manual_seed(i)
        opt.step(closure)
    assert len(calls) == 2 * len(X) - 1
    return opt


def plain(model):
    def backward(x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return backward


def assert_same(model, expected, rtol=1e-10):
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=1e-12)


# -- accumulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[16, 16], [20, 12], [1] * 32], ids=["2", "unequal", "32"])
def test_micro_batches_weighted_by_their_size_equal_the_full_batch(sizes):
    model, expected = network(), network()

    def backward(x, y):
        for u, v in zip(x.split(sizes), y.split(sizes)):
            (loss_of(model, u, v) * len(u) / len(x)).backward()

    train(model, backward)
    train(expected, plain(expected))
    # float64: a sum of gradients differs by rounding; the runs contract
    assert_same(model, expected)


def test_micro_batches_with_dropout_replay_all_their_masks():
    # Two evaluations of the whole accumulation draw the same masks, so that with lr = 0 the
    # correction g - g~ vanishes and d is exactly the average that the paper's rule gives.
    model = network(dropout=0.5)
    seen = []

    def backward(x, y):
        for u, v in zip(x.chunk(4), y.chunk(4)):
            (loss_of(model, u, v) / 4).backward()
        seen.append(model[0].weight.grad.clone())
        return None

    train(model, backward, lr=0.0)
    for first, second in zip(seen[1::2], seen[2::2]):
        assert torch.equal(first, second)


# -- clipping ------------------------------------------------------------------------------------


def test_clipping_inside_the_closure_clips_both_gradients_separately():
    bound = 0.1
    model = network()

    def gradient(blocks, xi):
        x, y = xi
        w = {n: torch.tensor(b, requires_grad=True) for (n, _), b in zip(names, blocks)}
        loss = F.smooth_l1_loss(functional_call(model, w, (x,)), y)
        g = torch.autograd.grad(loss, list(w.values()))
        norm = torch.sqrt(sum(t.square().sum() for t in g))
        scale = min(1.0, bound / float(norm + 1e-6))  # as clip_grad_norm_ does
        return [(t * scale).numpy() for t in g]

    names = list(model.named_parameters())
    x0 = [p.detach().numpy().copy() for _, p in names]
    stream = iter(zip(X, Y))
    expected = minimize(gradient, x0, lambda rng: next(stream), len(X), lr=0.3)

    def backward(x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), bound)
        return loss

    opt = train(model, backward)
    for p, block in zip(model.parameters(), expected.x):
        np.testing.assert_allclose(p.detach().numpy(), block, rtol=1e-9, atol=1e-12)
    assert opt.diagnostics()["grad_norm"] <= bound


def test_clipping_breaks_the_noiseless_identity():
    # What the docs warn of: d is no longer the gradient even without noise, because the two
    # gradients of a sample are shortened by different factors.
    def error(clip):
        model = network()
        opt = StormPlus(model.parameters(), lr=0.3)

        def closure():
            opt.zero_grad()
            loss = loss_of(model, X[0], 20 * Y[0])
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            return loss

        for _ in range(30):
            opt.step(closure)
        opt.zero_grad()
        loss_of(model, X[0], 20 * Y[0]).backward()
        pairs = [(opt.state[p]["estimator"], p.grad) for p in model.parameters()]
        norm = sum(g.square().sum() for _, g in pairs).sqrt()
        return float(sum((d - g).square().sum() for d, g in pairs).sqrt() / norm)

    assert error(clip=False) < 1e-12
    assert error(clip=True) > 0.1


# -- models of other kinds -------------------------------------------------------------------------


def test_a_compiled_model_and_its_dropout_are_replayed():
    model = network(dropout=0.5).float()
    compiled, gradients = torch.compile(model), []
    opt = StormPlus(model.parameters(), lr=0.0)  # so that both evaluations are at one point

    def closure():
        opt.zero_grad()
        loss = loss_of(compiled, X[0].float(), Y[0].float())
        loss.backward()
        gradients.append(model[0].weight.grad.clone())
        return loss

    for _ in range(3):
        opt.step(closure)
    for first, second in zip(gradients[1::2], gradients[2::2]):
        assert torch.equal(first, second)
    assert not torch.equal(gradients[0], gradients[1])


def test_torch_func_model():
    model, expected = network(), network()
    params = dict(model.named_parameters())

    def functional_loss(weights, x, y):
        return F.smooth_l1_loss(functional_call(model, weights, (x,)), y)

    def backward(x, y):
        weights = {n: p.detach() for n, p in params.items()}
        gradients, loss = grad_and_value(functional_loss)(weights, x, y)
        for n, p in params.items():
            p.grad = gradients[n]
        return loss

    train(model, backward)
    train(expected, plain(expected))
    assert_same(model, expected)


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encode = nn.Linear(6, 4, bias=False).double()
            self.decode = nn.Linear(4, 6, bias=False).double()
            self.decode.weight = nn.Parameter(self.encode.weight.detach().t().clone())
            self.again = nn.Linear(6, 4, bias=False).double()
            self.again.weight = self.encode.weight  # one parameter, two places

        def forward(self, x):
            return self.again(torch.tanh(self.decode(torch.tanh(self.encode(x))))).sum(1, True)

    model = Tied()
    assert len(list(model.parameters())) == 2
    shape = model.encode.weight.shape

    def gradient(blocks, xi):
        w, v = (torch.tensor(b, requires_grad=True) for b in blocks)
        x, y = xi
        out = (torch.tanh(torch.tanh(x @ w.T) @ v.T) @ w.T).sum(1, True)
        return [g.numpy() for g in torch.autograd.grad(F.smooth_l1_loss(out, y), (w, v))]

    x0 = [p.detach().numpy().copy() for p in model.parameters()]
    stream = iter(zip(X, Y))
    expected = minimize(gradient, x0, lambda rng: next(stream), len(X), lr=0.3)
    opt = train(model, plain(model))
    assert model.again.weight is model.encode.weight
    for p, block in zip(model.parameters(), expected.x):
        np.testing.assert_allclose(p.detach().numpy(), block, rtol=1e-9, atol=1e-12)
    assert opt.state[model.encode.weight]["estimator"].shape == shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_dropout(reentrant):
    # Its recomputation restores the random state of the forward pass and puts the stream
    # back afterwards; ours rewinds before the second evaluation. Together: the plain run.
    model, expected = network(dropout=0.5), network(dropout=0.5)

    def backward(x, y):
        x = x.clone().requires_grad_()  # what the reentrant kind needs
        hidden = checkpoint(model[:3], x, use_reentrant=reentrant)
        loss = F.smooth_l1_loss(model[3](hidden), y)
        loss.backward()
        return loss

    train(model, backward)
    train(expected, plain(expected))
    assert_same(model, expected)


def test_activation_checkpointing_runs_batch_norm_twice_whatever_the_optimizer():
    # torch's own: recomputation is a second forward pass. same_sample leaves one sample's
    # worth of it, which is two.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    opt = StormPlus(model.parameters(), lr=0.3)

    def closure():
        opt.zero_grad()
        hidden = checkpoint(model[:2], X[0], use_reentrant=False)
        loss = F.smooth_l1_loss(model[2](hidden), Y[0])
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(same_sample(opt, model)(closure))
    assert model[1].num_batches_tracked == 2 * 3


def test_parameters_edited_between_steps_need_a_restart():
    # The caveat: after a projection d belongs to another point. restart() puts it right.
    model = network()
    opt = train(model, plain(model))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.1)
    opt.restart()

    def closure():
        opt.zero_grad()
        return plain(model)(X[0], Y[0])

    opt.step(closure)
    for p in model.parameters():
        assert torch.equal(opt.state[p]["estimator"], p.grad)
