"""The same run on an accelerator. These tests skip where there is none."""

import pytest
import torch
from torch import nn

from stormplus import StormPlus
from tests.support.problems_for_tests import Network
from tests.torch.optimizers import PATHS, on

CUDA, MPS = torch.cuda.is_available(), torch.backends.mps.is_available()
devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA")),
        pytest.param("mps", marks=pytest.mark.skipif(not MPS, reason="no MPS")),
    ],
)


def run(device, **options):
    problem = Network(samples=30)
    params = [nn.Parameter(p.detach().float().to(device)) for p in problem.parameters()]
    opt = StormPlus(params, lr=0.3, **options)
    for u, y in problem.samples:
        xi = [torch.as_tensor(part, dtype=torch.float32, device=device) for part in (u, y)]
        opt.step(problem.closure(opt, params, xi))
    return params, opt.diagnostics()["sum_g_sq"]


@pytest.mark.parametrize("path", PATHS)
@devices
def test_equals_the_cpu(device, path):
    (here, a), (there, b) = run("cpu"), run(device, **PATHS[path])
    torch.testing.assert_close([p.cpu() for p in there], here, rtol=1e-4, atol=1e-5)
    assert b == pytest.approx(a, rel=1e-4)


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
