"""Gradients that are not finite, and steps that never wait for the device."""

import pytest
import torch
from problems_for_tests import Network
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stormplus import SimplifiedStormPlus, Storm, StormPlus

PATHS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
BAD = [float("inf"), float("-inf"), float("nan")]


def snapshot(opt, params):
    tensors = [p.detach().clone() for p in params]
    tensors += [opt.state[p]["estimator"].clone() for p in params]
    return tensors, opt.diagnostics()


def poison(closure, bad, when, calls):
    """The closure, with one element of a gradient spoiled at its `when`-th call."""

    def wrapped():
        calls.append(None)
        loss = closure()
        if len(calls) == when:
            spoiled[0].grad.view(-1)[1] = bad
        return loss

    spoiled = []
    wrapped.spoil = spoiled.append
    return wrapped


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("path", PATHS)
def test_first_evaluation_raises_before_anything_moved(path, bad):
    problem = Network(samples=5)
    params = problem.parameters()
    opt = StormPlus(zip(["in", "bias", "out"], params), **PATHS[path])
    problem.run(opt, params, problem.samples[:3])
    tensors, numbers = snapshot(opt, params)
    closure = poison(problem.closure(opt, params, problem.samples[3]), bad, 1, [])
    closure.spoil(params[2])
    with pytest.raises(FloatingPointError, match=r"'out'\) is not finite; nothing has moved"):
        opt.step(closure)
    after, later = snapshot(opt, params)
    assert all(torch.equal(a, b) for a, b in zip(tensors, after))
    assert numbers == later
    opt.step(problem.closure(opt, params, problem.samples[4]))  # and it goes on
    assert opt.diagnostics()["step"] == 4


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("path", PATHS)
def test_second_evaluation_leaves_a_pair_that_estimate_completes(path, bad):
    problem = Network(samples=30)
    params, twin_params = problem.parameters(), problem.parameters()
    opt = StormPlus(params, weight_decay=0.1, **PATHS[path])
    twin = StormPlus(twin_params, weight_decay=0.1, **PATHS[path])
    for i, xi in enumerate(problem.samples):
        good = problem.closure(opt, params, xi)
        if i == 7:
            closure = poison(good, bad, 2, [])
            closure.spoil(params[0])
            sums = opt.diagnostics()
            with pytest.raises(FloatingPointError, match="have moved and the step is pending"):
                opt.step(closure)
            assert opt.pending
            assert {k: v for k, v in opt.diagnostics().items() if k != "grad_evaluations"} == {
                k: v for k, v in sums.items() if k != "grad_evaluations"
            }
            good()
            opt.estimate()
        else:
            opt.step(good)
        twin.step(problem.closure(twin, twin_params, xi))
    for a, b in zip(params, twin_params):  # the estimate taken back costs one rounding
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_first_sample_of_all():
    p = nn.Parameter(torch.ones(2))
    opt = StormPlus([p])
    p.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(FloatingPointError, match=r"parameter 0 of group 0, shape .* nothing has"):
        opt.estimate()
    assert not opt.started
    p.grad = torch.ones(2)
    opt.estimate()
    assert opt.diagnostics()["sum_g_sq"] == 2


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-20, 1e19, 1e20, 1e38])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cls", [StormPlus, SimplifiedStormPlus, Storm])
def test_extreme_float32_gradients_are_finite(cls, path, value):
    p = nn.Parameter(torch.zeros(1))
    opt = cls([p], **PATHS[path])
    for sign in (1, -1, 1, 1):
        for half in (opt.move, opt.estimate) if opt.started else (opt.estimate,):
            p.grad = torch.full((1,), sign * value)
            half()
    numbers = opt.diagnostics()
    assert torch.isfinite(p).all()
    assert 0 < numbers["gain"] <= 1
    assert numbers["sum_g_sq"] == pytest.approx(4 * float(torch.tensor(value).double()) ** 2)


@pytest.mark.parametrize("path", PATHS)
def test_large_float64_gradients_are_finite(path):
    # 1e60 is not a float32; enough elements for the compiled kernels to be used
    p = nn.Parameter(torch.zeros(100_000, dtype=torch.float64))
    opt = StormPlus([p], **PATHS[path])
    for value in (1.0, 1e60, 1.0):
        for half in (opt.move, opt.estimate) if opt.started else (opt.estimate,):
            p.grad = torch.full_like(p, value)
            half()
    assert torch.isfinite(p).all()
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(1e125)


def test_sums_that_would_overflow_are_refused():
    # |g|^2 = 1e240 is a float64, |d|^2/a = 1e240 * 1e160 is not
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = StormPlus([p])
    p.grad = torch.full((1,), 1e120, dtype=torch.float64)
    with pytest.raises(FloatingPointError):
        opt.estimate()
    p.grad.fill_(1.0)
    opt.estimate()
    assert opt.diagnostics()["sum_d_sq_over_a"] == pytest.approx(2 ** (2 / 3))


@pytest.mark.parametrize("path", PATHS)
def test_estimate_taken_back_never_leaves_an_inf(path):
    # d + g overflows though both are finite: d is given up there, and the pair completes
    p = nn.Parameter(torch.zeros(2))
    opt = StormPlus([p], lr=0.0, **PATHS[path])
    p.grad = torch.tensor([3e38, 1.0])
    opt.estimate()
    p.grad = torch.tensor([-3e38, float("inf")])
    with pytest.raises(FloatingPointError, match="nothing has moved"):
        opt.move()
    p.grad = torch.zeros(2)
    opt.move()
    p.grad = torch.tensor([3e38, float("inf")])
    with pytest.raises(FloatingPointError, match="pending"):
        opt.estimate()
    p.grad = torch.ones(2)
    opt.estimate()
    assert torch.isfinite(opt.state[p]["estimator"]).all()
    assert opt.diagnostics()["step"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_without_the_check_d_takes_what_comes_until_a_restart(path):
    p = nn.Parameter(torch.ones(3))
    opt = StormPlus([p], check_finite=False, **PATHS[path])
    for value in (1.0, float("inf")):
        for half in (opt.move, opt.estimate) if opt.started else (opt.estimate,):
            p.grad = torch.tensor([1.0, value if half == opt.estimate else 1.0, 1.0])
            half()
    assert not torch.isfinite(opt.state[p]["estimator"][1])
    assert torch.isfinite(p).all()  # the move did not depend on this sample
    opt.restart()
    p.grad = torch.ones(3)
    opt.estimate()
    assert torch.isfinite(opt.state[p]["estimator"]).all()


@pytest.mark.parametrize("path", PATHS)
def test_without_the_check_the_sums_still_never_see_an_inf(path):
    p = nn.Parameter(torch.ones(3))
    opt = StormPlus([p], check_finite=False, **PATHS[path])
    p.grad = torch.ones(3)
    opt.estimate()
    opt.move()
    before = opt.diagnostics()
    p.grad = torch.tensor([1.0, float("inf"), 1.0])
    opt.estimate()
    assert opt.diagnostics()["sum_g_sq"] == before["sum_g_sq"]
    assert opt.diagnostics()["sum_d_sq_over_a"] == before["sum_d_sq_over_a"]
    opt.restart()
    p.grad = torch.ones(3)
    opt.estimate()
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(before["sum_g_sq"] + 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scope": "tensor"},
        {"norm": "mean"},
        {"foreach": True},
        {"fused": True},
        {"replay_rng": False},
        {"lr": "tensor"},
    ],
)
@pytest.mark.parametrize("cls", [StormPlus, SimplifiedStormPlus, Storm])
def test_no_host_synchronisation_without_the_check(cls, options):
    # A fake tensor has no value: whatever would wait for one raises.
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if "lr" in options:
            options = {"lr": torch.tensor(0.1)}
        opt = cls(model.parameters(), check_finite=False, max_move=1.0, weight_decay=0.1, **options)
        x = torch.randn(16, 4)

        def closure():
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            opt.step(closure)
        assert opt.started


def test_the_check_does_wait():
    with FakeTensorMode():
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            StormPlus([p]).estimate()
