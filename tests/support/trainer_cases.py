"""A network with BatchNorm and dropout, its data, and the plain loop to compare trainers with.

Each `<trainer>_cases.py` has one function, `fit(folder, **settings)`, which trains this network on
this data with one trainer and returns a `Run`. Settings that all of them have:

    kind, lr, dtype, epochs    the optimizer and the run
    half, scale, clip, accumulate, schedule
    tool                       False leaves our callback, mixin or subclass out
    setup(net), after(net)     called before the run, and after every step
    run                        a `Run` to fill, for runs that fail
    watch                      validate and save after every epoch: `run.validated`, `run.saved`
    resume                     go on from what a watched run saved after its first epoch
    recalibrate_batches        of Untuned's callback
"""

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from stormplus import StormPlus, Untuned, same_sample, scaled_step
from stormplus.torch import PairedOptimizer
from stormplus.untuned_rule import INTERPOLATION, average_weight

ROWS = 8  # of a batch
BATCHES, EPOCHS = 6, 2
SAMPLES = BATCHES * EPOCHS


def data(batches=BATCHES, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batches * ROWS, 6, generator=draw, dtype=torch.float64)
    noise = torch.randn(batches * ROWS, 1, generator=draw, dtype=torch.float64)
    return x.to(dtype), (torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * noise).to(dtype)


class Network(nn.Module):
    """Counts its evaluations in train mode, and fails in one of them if asked to."""

    def __init__(self, dtype=torch.float64, dropout=0.3):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
        ).to(dtype)  # fmt: skip
        self.evaluations, self.fails_at = 0, None

    def forward(self, x):
        self.evaluations += self.training
        if self.training and self.evaluations == self.fails_at:
            raise OSError("a broken disc")
        return self.body(x)


def network(dtype=torch.float64, dropout=0.3, seed=0):
    torch.manual_seed(seed)
    return Network(dtype, dropout)


def distance(out, y):
    return F.smooth_l1_loss(out.to(y.dtype), y)  # autocast answers in half precision


def loss_of(model, x, y, half=None):
    with nullcontext() if half is None else torch.autocast("cpu", dtype=half):
        out = model(x)
    return distance(out, y)


def snapshot(model):
    """Parameters and buffers, without `state_dict`, which may swap an average in."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().clone() for name, value in tensors}


class Run(SimpleNamespace):
    """What a run leaves: the states after every step, the optimizer, the network."""

    def __init__(self):
        super().__init__(states=[], opt=None, net=None, validated={}, saved={})


def nothing(*_):
    pass


def make(kind, params, lr=1.0, **options):
    """Construct an optimizer; Untuned has no lr."""
    return kind(params, **options) if kind is Untuned else kind(params, lr=lr, **options)


def plain_run(
    *, kind=StormPlus, batches=BATCHES, epochs=EPOCHS, accumulate=1, divisor=None,
    dtype=torch.float64, half=None, clip=None, schedule=None, scale=None, before=nothing, lr=1.0,
):  # fmt: skip
    """The loop that the README shows; the number of a sample's first batch is its seed."""
    x, y = data(batches, dtype)
    run = Run()
    net = run.net = network(dtype)
    opt = run.opt = make(kind, net.parameters(), lr)
    scaler = run.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    run.losses = []

    def process():
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)

    starts = [(epoch, start) for epoch in range(epochs) for start in range(0, batches, accumulate)]
    for step, (epoch, start) in enumerate(starts):
        window = range(start, min(start + accumulate, batches))

        def closure():
            opt.zero_grad()
            total = 0.0
            for i in window:
                rows = slice(i * ROWS, (i + 1) * ROWS)
                part = loss_of(net, x[rows], y[rows], half) / (divisor or len(window))
                scaler.scale(part).backward()
                total += part.detach()
            if not scale:
                process()
            run.losses.append(float(total))
            return total

        opt.param_groups[0]["lr"] = lr * (1.0 if schedule is None else schedule(step))
        before(step, opt, net)
        torch.manual_seed(epoch * batches + start)
        if scale:
            scaled_step(opt, scaler, closure, net, process=process)
        elif issubclass(kind, PairedOptimizer):
            opt.step(same_sample(opt, net)(closure))
        else:
            opt.step(closure)
        run.states.append(snapshot(net))
    return run


def untuned_run(**options):
    """The plain loop with `Untuned`, and the average after every step, from the iterates alone.

    With y = (1 - b) z + b x and x <- x + c (z - x), a new y and the previous x determine z.
    """
    run = plain_run(kind=Untuned, **options)
    first = network(options.get("dtype", torch.float64)).state_dict()
    x = {name: first[name] for name, _ in run.net.named_parameters()}
    run.averages, b = [], INTERPOLATION
    for t, state in enumerate(run.states, 1):
        c = float(average_weight(t))
        z = {k: (state[k] - b * (1 - c) * x[k]) / (1 - b + b * c) for k in x}
        x = {k: x[k] + c * (z[k] - x[k]) for k in x}
        run.averages.append(x)
    return run


def assert_at_average(state, plain, step):
    """All weights are those of the average after a step of `untuned_run`, not of the iterate."""
    average, iterate = plain.averages[step - 1], plain.states[step - 1]
    close = 1e-9 if average["body.0.weight"].dtype == torch.float64 else 1e-5
    for name, value in average.items():
        torch.testing.assert_close(state[name], value, rtol=close, atol=close)
    apart = (average["body.0.weight"] - iterate["body.0.weight"]).abs().max()
    assert apart > 20 * close


def assert_same_states(states, expected):
    assert len(states) == len(expected) > 0
    for step, (ours, theirs) in enumerate(zip(states, expected)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), f"{name} differs after step {step + 1}"


def assert_same_runs(run, plain):
    assert_same_states(run.states, plain.states)
    assert any(not torch.equal(plain.states[0][k], v) for k, v in plain.states[-1].items())
    assert run.net.evaluations == plain.net.evaluations
    assert run.opt.diagnostics() == plain.opt.diagnostics()


def hooks_left(opt):
    return [*opt._pass_hooks.values(), *opt._optimizer_step_pre_hooks.values()]


def warnings_with(recwarn, text):
    return [str(w.message) for w in recwarn if text in str(w.message)]


# -- two processes -------------------------------------------------------------------------------


def joined_run(samples):
    """One process, on the rows of two ranks; a sample is a list of (rows of 0, rows of 1).

    BatchNorm sees each rank's rows apart, and the statistics that remain are those of rank 0.
    """
    x, y = data(1 + max(int(rows.max()) for sample in samples for rows in sample[-1]) // ROWS)
    model = network(dropout=0.0)
    opt = StormPlus(model.parameters())
    states = []
    for sample in samples:

        def closure():
            opt.zero_grad()
            for ours, theirs in sample:
                buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

                def elsewhere(u):
                    return functional_call(model, buffers, (u,))

                loss = loss_of(model, x[ours], y[ours])
                loss = (loss + loss_of(elsewhere, x[theirs], y[theirs])) / 2
                (loss / len(sample)).backward()
            return loss

        opt.step(same_sample(opt, model)(closure))
        states.append(snapshot(model))
    return states, opt


def launch_two_ranks(job, folder, *args):
    """Run a script in two processes and return what each has left in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(job), str(folder), *map(str, args)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def assert_equal_ranks(ranks, expected):
    """Both ranks, to the bit, and one process, to rounding: float64, summed in another order."""
    parameters = {name for name, _ in network().named_parameters()}
    for rank in ranks:
        assert len(rank["states"]) == len(expected)
    for step, state in enumerate(expected):
        for name, value in state.items():
            ours = ranks[0]["states"][step][name]
            torch.testing.assert_close(ours, value, rtol=1e-12, atol=1e-12)
            if name in parameters:
                assert torch.equal(ours, ranks[1]["states"][step][name])
