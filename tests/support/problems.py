"""Small non-linear problems whose runs do not amplify rounding."""

from itertools import pairwise

import numpy as np
import torch
from torch import nn


class Network:
    """Two tanh layers and a bounded loss, in float64; each sample is a small batch.

    Gradients are of order one and the curvature differs from sample to sample. The loss
    is bounded, so a run neither explodes nor is chaotic: two implementations that differ
    by rounding stay together to about 1e-13 over 200 steps.
    """

    shapes = ((5, 4), (5,), (3, 5))

    def __init__(self, seed=0, samples=200):
        rng = np.random.default_rng(seed)
        self.x0 = [0.5 * rng.normal(size=shape) for shape in self.shapes]
        teacher = [rng.normal(size=shape) for shape in self.shapes]
        self.samples = []
        for _ in range(samples):
            u = rng.normal(size=(8, 4))
            y = np.tanh(u @ teacher[0].T + teacher[1]) @ teacher[2].T
            self.samples.append((u, y + 0.3 * rng.normal(size=y.shape)))

    def loss(self, params, xi):
        u, y = (torch.as_tensor(part, dtype=params[0].dtype) for part in xi)
        error = torch.tanh(u @ params[0].T + params[1]) @ params[2].T - y
        return torch.log1p(0.5 * error.square()).sum(dim=1).mean()

    def gradient(self, blocks, xi):
        params = [torch.tensor(b, dtype=torch.float64, requires_grad=True) for b in blocks]
        return [g.numpy() for g in torch.autograd.grad(self.loss(params, xi), params)]

    def parameters(self, dtype=torch.float64):
        return [torch.nn.Parameter(torch.tensor(b, dtype=dtype)) for b in self.x0]


# No output dimension divides by 4, and the last is smaller than 4: with 4 processes some
# shards are short and some are empty.
WIDTHS = (6, 9, 5, 1)
EVEN = (6, 8, 5, 1)  # torch's tensor parallelism wants a hidden dimension that divides evenly


class Tanh(nn.Module):
    def __init__(self, dtype=torch.float64, seed=0, widths=WIDTHS):
        super().__init__()
        layers = [nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)]
        self.layers = nn.ModuleList(layers)
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) / 2

    def forward(self, u):
        for layer in self.layers:
            u = torch.tanh(layer(u))
        return u


def bounded_loss(prediction, y):
    return torch.log1p(0.5 * (prediction - y).square()).sum(dim=1).mean()


def batches(steps, rows=8, dtype=torch.float64, seed=1):
    """A joined batch for each step, of a size that 2 and 4 divide."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(steps, rows, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(steps, rows, 1, generator=generator, dtype=torch.float64)
    y = torch.sin(u.sum(dim=2, keepdim=True)) + 0.3 * noise
    return list(zip(u.to(dtype), y.to(dtype)))
