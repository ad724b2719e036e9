"""The same run on an accelerator. These tests skip where there is none."""

import pytest
import torch
from optimizers import PATHS, on
from problems_for_tests import Network
from torch import nn

from stormplus import StormPlus

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
)
MPS = pytest.param(
    "mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no MPS")
)
devices = pytest.mark.parametrize("device", [CUDA, MPS])


def run(device, samples=30, **options):
    problem = Network(samples=samples)
    params = [nn.Parameter(p.detach().float().to(device)) for p in problem.parameters()]
    opt = StormPlus(params, lr=0.3, **options)
    for u, y in problem.samples:
        xi = [torch.as_tensor(part, dtype=torch.float32, device=device) for part in (u, y)]
        opt.step(problem.closure(opt, params, xi))
    return params, opt


@pytest.mark.parametrize("path", PATHS)
@devices
def test_equals_the_cpu(device, path):
    (here, a), (there, b) = run("cpu"), run(device, **PATHS[path])
    for p, q in zip(here, there):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-4, atol=1e-5)
    assert b.diagnostics()["sum_g_sq"] == pytest.approx(a.diagnostics()["sum_g_sq"], rel=1e-4)


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
def test_parameters_on_two_devices_and_a_module_that_moves(device):
    p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, device=device))
    opt = StormPlus([p, q])
    for _ in range(3):
        opt.step(on(opt, lambda: torch.sin(p).sum() + torch.sin(q).sum().cpu()))
    torch.testing.assert_close(p, q.cpu())
    model = nn.Linear(4, 1)
    moved = StormPlus(model.parameters())
    model.to(device)
    x = torch.ones(2, 4, device=device)
    for _ in range(3):
        moved.step(on(moved, lambda: model(x).square().mean()))
    assert moved.state[model.weight]["estimator"].device == model.weight.device


@pytest.mark.parametrize("device", [CUDA])
def test_no_wait_for_the_device_without_the_check(device):
    params, opt = run(device, samples=3, check_finite=False)
    for p in params:
        p.grad = torch.ones_like(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.move()
        opt.estimate()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt.started
