"""Non-linear models, their data, and one loop for every way of spreading them."""

from itertools import pairwise

import torch
from torch import nn

from stormplus import SimplifiedStormPlus, Storm, StormPlus

OPTIMIZERS = {"storm+": StormPlus, "simplified": SimplifiedStormPlus, "storm": Storm}

# No output dimension divides by 4, and the last is smaller than 4: with 4 processes some
# shards are short and some are empty.
WIDTHS = (6, 9, 5, 1)


class Tanh(nn.Module):
    """Three tanh layers with a bounded loss: a run neither explodes nor is chaotic."""

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


class Normalised(nn.Module):
    """BatchNorm with both kinds of momentum, and dropout."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 1, dtype=dtype)
        self.fixed = nn.BatchNorm1d(6, momentum=0.3, dtype=dtype)
        self.cumulative = nn.BatchNorm1d(8, momentum=None, dtype=dtype)
        self.drop = nn.Dropout(0.3)

    def forward(self, u):
        h = self.cumulative(self.first(self.fixed(u)))
        return self.last(self.drop(torch.tanh(h)))


def bounded_loss(prediction, y):
    return torch.log1p(0.5 * (prediction - y).square()).sum(dim=1).mean()


def batches(steps, rows=8, dtype=torch.float64, seed=1):
    """A joined batch for each step, of a size that 2 and 4 divide."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(steps, rows, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(steps, rows, 1, generator=generator, dtype=torch.float64)
    y = torch.sin(u.sum(dim=2, keepdim=True)) + 0.3 * noise
    return list(zip(u.to(dtype), y.to(dtype)))


def share(batch, rank, size):
    """The rows of a batch that are this rank's."""
    return tuple(part.chunk(size)[rank] for part in batch)


class Loop:
    """Trains with `step(closure)` or `move`/`estimate` and counts the evaluations."""

    def __init__(self, model, opt, after_backward=lambda: None):
        self.model, self.opt, self.after_backward = model, opt, after_backward
        self.calls = 0

    def evaluate(self, batch):
        self.calls += 1
        self.opt.zero_grad()
        u, y = batch
        loss = bounded_loss(self.model(u), y)
        loss.backward()
        self.after_backward()
        return loss

    def step(self, batch):
        return self.opt.step(lambda: self.evaluate(batch))

    def move_and_estimate(self, batch):
        if self.opt.started:
            self.evaluate(batch)
            self.opt.move()
        self.evaluate(batch)
        self.opt.estimate()


def whole(t):
    """A copy of the whole of a tensor, sharded or not."""
    full = t.detach()
    return (full.full_tensor() if hasattr(full, "full_tensor") else full).clone()


def result(model, opt, calls=None):
    """What two runs are compared by."""
    return {
        "x": [whole(p) for p in model.parameters()],
        "d": [whole(opt.state[p]["estimator"]) for p in model.parameters()],
        "numbers": opt.diagnostics(),
        "calls": calls,
    }


def joined_run(data, make_opt, dtype=torch.float64, model=None, each=lambda: None):
    """One process on the joined batches."""
    model = Tanh(dtype) if model is None else model
    opt = make_opt(model)
    loop = Loop(model, opt)
    for batch in data:
        loop.step(batch)
        each()
    return result(model, opt, loop.calls)


def assert_equal_runs(run, expected, rtol):
    for key in ("x", "d"):
        for a, b in zip(run[key], expected[key], strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))
    for name, number in expected["numbers"].items():
        assert abs(run["numbers"][name] - number) <= rtol * abs(number), name


def growth(data, make_opt, widths=WIDTHS, nudge=1e-10):
    """By how much a run of one process magnifies a relative change of its starting point."""
    models = [Tanh(widths=widths), Tanh(widths=widths)]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in models[1].parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.mul_(1 + nudge * noise)
    runs = [joined_run(data, make_opt, model=model) for model in models]
    pairs = [pair for key in ("x", "d") for pair in zip(runs[0][key], runs[1][key])]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs) / nudge


def assert_same_bits(runs):
    for other in runs[1:]:
        for key in ("x", "d"):
            assert all(torch.equal(a, b) for a, b in zip(runs[0][key], other[key], strict=True))
        assert other["numbers"] == runs[0]["numbers"]
