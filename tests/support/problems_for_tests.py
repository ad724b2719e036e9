"""Small non-linear problems whose runs do not amplify rounding."""

import numpy as np
import torch


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

    def closure(self, opt, params, xi, calls=None):
        def closure():
            if calls is not None:
                calls.append(xi)
            opt.zero_grad()
            loss = self.loss(params, xi)
            loss.backward()
            return loss

        return closure
