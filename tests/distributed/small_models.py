"""One loop for every way of spreading a model, and what runs are compared by."""

import torch
import torch.distributed as dist

from stormplus import SimplifiedStormPlus, Storm, StormPlus, Untuned
from tests.support.problems import WIDTHS, Tanh, batches, bounded_loss
from tests.torch.optimizers import halves

OPTIMIZERS = {
    "storm+": StormPlus,
    "simplified": SimplifiedStormPlus,
    "storm": Storm,
    "untuned": Untuned,
}
BUFFERS = ("estimator", "z_minus_x", "grad_rms", "initial_sample")


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
        halves(self.opt, lambda: self.evaluate(batch))

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
