"""Non-linear models, their data, and one loop for every way of spreading them."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned

OPTIMIZERS = {
    "storm+": StormPlus,
    "simplified": SimplifiedStormPlus,
    "storm": Storm,
    "untuned": Untuned,
}
BUFFERS = ("estimator", "z_minus_x", "grad_rms", "initial_sample")

# No output dimension divides by 4, and the last is smaller than 4: with 4 processes some
# shards are short and some are empty.
WIDTHS = (6, 9, 5, 1)
EVEN = (6, 8, 5, 1)  # torch's tensor parallelism wants a hidden dimension that divides evenly


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
    """BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.last = nn.Linear(8, 1, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)

    def forward(self, u):
        return self.last(self.drop(torch.tanh(self.norm(self.first(u)))))


def bounded_loss(prediction, y):
    return torch.log1p(0.5 * (prediction - y).square()).sum(dim=1).mean()


def batches(steps, rows=8, dtype=torch.float64, seed=1):
    """A joined batch for each step, of a size that 2 and 4 divide."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(steps, rows, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(steps, rows, 1, generator=generator, dtype=torch.float64)
    y = torch.sin(u.sum(dim=2, keepdim=True)) + 0.3 * noise
    return list(zip(u.to(dtype), y.to(dtype)))


def place():
    return dist.get_rank(), dist.get_world_size()


def share(batch, rank, size):
    """The rows of a batch that are this rank's."""
    return tuple(part.chunk(size)[rank] for part in batch)


def make_optimizer(model, method="storm+", **options):
    """Two parameter groups, the second at half the pace."""
    params = list(model.parameters())
    slower = {"factor": 0.5} if method == "untuned" else {"lr": 0.5}
    return OPTIMIZERS[method]([{"params": params[:3]}, {"params": params[3:]} | slower], **options)


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

    def train(self, joined):
        """Take this rank's share of joined batches."""
        for batch in joined:
            self.step(share(batch, *place()))
        return self

    def result(self, **more):
        return result(self.model, self.opt, self.calls) | more


def whole(t):
    """A copy of the whole of a tensor, sharded or not."""
    full = t.detach()
    return (full.full_tensor() if hasattr(full, "full_tensor") else full).clone()


def result(model, opt, calls=None):
    """What two runs are compared by: parameters, buffers, the average if there is one, numbers."""
    params = list(model.parameters())
    state = [opt.state[p][name] for p in params for name in BUFFERS if name in opt.state[p]]
    out = {"x": [whole(p) for p in params], "d": [whole(t) for t in state], "calls": calls}
    if isinstance(opt, Untuned):
        opt.eval()
        out["d"] += [whole(p) for p in params]
        opt.train()
    return out | {"numbers": opt.diagnostics()}


def joined_run(steps, dtype=torch.float64, widths=WIDTHS, schedule=None, **options):
    """One process on the joined batches."""
    model = Tanh(dtype, widths=widths)
    loop = Loop(model, make_optimizer(model, **options))
    schedule = schedule and schedule(loop.opt)
    for batch in batches(steps, dtype=dtype):
        loop.step(batch)
        if schedule:
            schedule.step()
    return loop.result()


def assert_equal_runs(run, expected, rtol):
    for key in ("x", "d"):
        for a, b in zip(run[key], expected[key], strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))
    for name, number in expected["numbers"].items():
        assert abs(run["numbers"][name] - number) <= rtol * abs(number), name


def assert_same_bits(runs):
    for other in runs[1:]:
        for key in ("x", "d"):
            assert all(torch.equal(a, b) for a, b in zip(runs[0][key], other[key], strict=True))
        assert other["numbers"] == runs[0]["numbers"]
