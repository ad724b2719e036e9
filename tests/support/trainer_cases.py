"""A network with BatchNorm and dropout, its data, and the plain PyTorch loop to compare with."""

import os
import socket
import subprocess
import sys

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from stormplus import StormPlus, same_sample

ROWS = 8  # of a batch


def data(batches, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batches * ROWS, 6, generator=draw, dtype=torch.float64)
    y = torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * torch.randn(
        batches * ROWS, 1, generator=draw, dtype=torch.float64
    )
    return x.to(dtype), y.to(dtype)


def network(dtype=torch.float64, dropout=0.3):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    ).to(dtype)  # fmt: skip


def loss_of(model, x, y):
    return F.smooth_l1_loss(model(x), y)


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain_run(
    batches,
    *,
    epochs=1,
    accumulate=1,
    dtype=torch.float64,
    loss=loss_of,
    process=lambda model: None,
    schedule=None,
    divisor=None,
    **options,
):
    """The states after every step of the loop that the README shows, and the optimizer.

    The random numbers of an epoch start from its number; both evaluations see the same.
    """
    x, y = data(batches, dtype)
    model = network(dtype)
    opt = StormPlus(model.parameters(), **options)
    scheduler = schedule(opt) if schedule else None
    states, losses = [], []
    for epoch in range(epochs):
        torch.manual_seed(epoch)
        for start in range(0, batches, accumulate):
            window = range(start, min(start + accumulate, batches))

            def closure():
                opt.zero_grad()
                total = 0.0
                for i in window:
                    rows = slice(i * ROWS, (i + 1) * ROWS)
                    part = loss(model, x[rows], y[rows]) / (divisor or len(window))
                    part.backward()
                    total += part.detach()
                process(model)
                losses.append(float(total))
                return total

            opt.step(same_sample(opt, model)(closure))
            if scheduler is not None:
                scheduler.step()
            states.append(snapshot(model))
    return states, opt, losses


def assert_same_states(states, expected):
    assert len(states) == len(expected)
    for step, (ours, theirs) in enumerate(zip(states, expected)):
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), f"{name} differs after step {step + 1}"


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
    """What each of two processes has left in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "PYTHONPATH": os.path.dirname(__file__),
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
