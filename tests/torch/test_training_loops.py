"""Random numbers are replayed with micro-batches, compiled models and recomputation."""

import numpy as np
import pytest
import torch
from optimizers import on
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stormplus import StormPlus

DATA = torch.Generator().manual_seed(0)
X = torch.randn(15, 32, 6, generator=DATA, dtype=torch.float64)
Y = torch.randn(15, 32, 1, generator=DATA, dtype=torch.float64)


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    return nn.Sequential(*layers).double()


def loss_of(model, x, y):
    return F.smooth_l1_loss(model(x), y)


def train(model, backward=None, lr=0.3):
    """`backward(x, y)` fills the gradients, by default those of the loss; returns the optimizer."""
    opt = StormPlus(model.parameters(), lr=lr)
    backward = backward or (lambda x, y: loss_of(model, x, y).backward())
    for i, (x, y) in enumerate(zip(X, Y)):

        def closure():
            opt.zero_grad()
            return backward(x, y)

        torch.manual_seed(i)
        opt.step(closure)
    return opt


def plain_run(dropout=0.0):
    model = network(dropout)
    train(model)
    return [p.detach() for p in model.parameters()]


def assert_same(model, expected):
    for p, q in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), np.asarray(q), rtol=1e-9, atol=1e-12)


def test_micro_batches_with_dropout_replay_all_their_masks():
    # With lr = 0 both evaluations are at one point: the same masks give the same gradient.
    model, seen = network(dropout=0.5), []

    def backward(x, y):
        for u, v in zip(x.chunk(4), y.chunk(4)):
            (loss_of(model, u, v) / 4).backward()
        seen.append(model[0].weight.grad.clone())

    train(model, backward, lr=0.0)
    assert all(torch.equal(*pair) for pair in zip(seen[1::2], seen[2::2]))


@pytest.mark.long
def test_the_dropout_of_a_compiled_model_is_replayed():
    model, gradients = network(dropout=0.5).float(), []
    compiled = torch.compile(model)
    opt = StormPlus(model.parameters(), lr=0.0)
    evaluate = on(opt, lambda: loss_of(compiled, X[0].float(), Y[0].float()))

    def closure():
        evaluate()
        gradients.append(model[0].weight.grad.clone())

    for _ in range(3):
        opt.step(closure)
    assert all(torch.equal(*pair) for pair in zip(gradients[1::2], gradients[2::2]))
    assert not torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_dropout(reentrant):
    # Its recomputation restores the random state of the forward pass and puts the stream
    # back afterwards; ours rewinds before the second evaluation. Together: the plain run.
    model = network(dropout=0.5)

    def backward(x, y):
        x = x.clone().requires_grad_()  # what the reentrant kind needs
        hidden = checkpoint(model[:3], x, use_reentrant=reentrant)
        F.smooth_l1_loss(model[3](hidden), y).backward()

    train(model, backward)
    assert_same(model, plain_run(dropout=0.5))
