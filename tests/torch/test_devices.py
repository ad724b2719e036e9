"""Runs on an accelerator; skipped where there is none.

`python -m stormplus.doctor --device` compares whole runs with those on the CPU.
"""

import pytest
import torch
from torch import nn

from stormplus import StormPlus
from tests.torch.optimizers import on

FOUND = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param(name, marks=pytest.mark.skipif(not found, reason=f"no {name}"))
        for name, found in FOUND.items()
    ],
)


@devices
def test_dropout_is_replayed(device):
    p, seen = nn.Parameter(torch.ones(64, device=device)), []
    p.register_hook(lambda g: seen.append(g.clone()))
    opt = StormPlus([p])
    for _ in range(2):
        opt.step(on(opt, lambda: nn.functional.dropout(p).sum()))
    assert torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[0], seen[1])


@devices
def test_parameters_on_two_devices_and_one_that_moves_there(device):
    p, q, moves = (nn.Parameter(torch.ones(4)) for _ in range(3))
    q.data = q.data.to(device)
    opt = StormPlus([p, q, moves])
    moves.data = moves.data.to(device)
    for _ in range(3):
        opt.step(on(opt, lambda: torch.sin(p).sum() + torch.sin(q + moves).sum().cpu()))
    assert opt.state[moves]["estimator"].device == moves.device
    torch.testing.assert_close(q, moves)
