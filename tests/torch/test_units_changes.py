"""Untuned when things change on the way: freezing, missing gradients, groups, restarts."""

import copy

import pytest
import torch
from problems_for_tests import Network, backward
from torch import nn

from stormplus import Untuned

BOTH = pytest.mark.parametrize("correction", [False, True])
BAD = [float("inf"), float("-inf"), float("nan")]


def made(samples=20, **options):
    problem = Network(samples=samples)
    params = problem.parameters()
    return problem, params, Untuned(zip("abc", params), 0.3, **options)


def everything(opt, params):
    """All tensors and numbers, copied."""
    return copy.deepcopy(([p.detach() for p in params], opt.state_dict()["state"]))


def assert_same(ours, theirs):
    for a, b in zip(ours[0], theirs[0]):
        assert torch.equal(a, b)
    for i, state in theirs[1].items():
        assert state.keys() == ours[1][i].keys()
        for name, value in state.items():
            same = torch.equal if torch.is_tensor(value) else (lambda a, b: a == b)
            assert same(ours[1][i][name], value), name


@BOTH
@pytest.mark.parametrize("average", [True, False])
def test_freezing_and_unfreezing(correction, average):
    problem, params, opt = made(correction=correction, average=average)
    problem.run(opt, params, problem.samples[:5])
    r = opt.diagnostics()["distance"]
    params[1].requires_grad_(False)
    held = params[1].detach().clone()
    problem.run(opt, params, problem.samples[5:10])
    assert torch.equal(params[1], held)
    assert opt.state[params[1]].keys().isdisjoint(opt.buffers)  # its memory is free
    params[1].requires_grad_(True)
    params[1].grad = None
    problem.run(opt, params, problem.samples[10:11])
    assert torch.equal(opt.state[params[1]]["origin"], held)  # it starts anew, from here
    problem.run(opt, params, problem.samples[11:])
    assert not torch.equal(params[1], held)
    assert opt.diagnostics()["step"] == 20
    assert opt.diagnostics()["distance"] >= r
    opt.eval()
    assert all(torch.isfinite(p).all() for p in params)


@BOTH
def test_the_keeper_of_the_numbers_is_frozen(correction):
    problem, params, opt = made(correction=correction, gradient=0.5)
    problem.run(opt, params, problem.samples[:5])
    opt.eval()
    params[0].requires_grad_(False)
    assert opt.at_average
    opt.train()
    problem.run(opt, params, problem.samples[5:10])
    assert opt._home is opt.state[params[1]]
    assert opt._home["fixed_gradient"] == 0.5
    assert opt.diagnostics()["step"] == 10


def test_a_parameter_moved_to_another_dtype_takes_its_buffers_along():
    model = nn.Linear(3, 2)
    opt = Untuned(model.parameters())
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(4, 3, dtype=dtype)).square().sum().backward()
            opt.step()
    assert {opt.state[model.weight][name].dtype for name in opt.buffers} == {torch.float64}


def test_who_has_no_gradient_yet_waits():
    problem, params, opt = made()
    for xi in problem.samples[:6]:
        backward(problem, opt, params, xi)
        params[1].grad = None
        opt.step()
    assert torch.equal(params[1], torch.tensor(problem.x0[1]))
    backward(problem, opt, params, problem.samples[6])
    g = params[1].grad.clone()
    opt.step()
    assert torch.equal(opt.state[params[1]]["estimator"], g)
    assert torch.equal(opt.state[params[1]]["gradient_unit"], g.abs())


def test_a_missing_gradient_is_a_zero_gradient_later_on():
    runs = []
    for missing in (True, False):
        problem, params, opt = made()
        for i, xi in enumerate(problem.samples):
            backward(problem, opt, params, xi)
            if i % 3 == 2:
                params[1].grad = None if missing else torch.zeros_like(params[1])
            opt.step()
        runs.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_no_gradient_at_all_is_refused_at_every_step():
    problem, params, opt = made()
    with pytest.raises(RuntimeError, match="no parameter has a gradient: call"):
        opt.step()
    problem.run(opt, params, problem.samples[:3])
    before = everything(opt, params)
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="no parameter has a gradient: call"):
        opt.step()
    assert_same(everything(opt, params), before)


@BOTH
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_a_group_that_comes_later(correction, scope):
    problem = Network(samples=20)
    params = problem.parameters()
    opt = Untuned(params[:2], 0.3, correction=correction, scope=scope)
    problem.run(opt, params, problem.samples[:8])
    numbers = opt.diagnostics()
    opt.add_param_group({"params": [params[2]], "lr": 0.1})
    assert opt.diagnostics() == numbers
    problem.run(opt, params, problem.samples[8:])
    assert torch.equal(opt.state[params[2]]["origin"], torch.tensor(problem.x0[2]))
    assert not torch.equal(params[2], torch.tensor(problem.x0[2]))
    steps = {"global": [20], "group": [20, 12], "tensor": [20, 20, 12]}[scope]
    assert opt._home["step"].tolist() == steps


def test_restart_takes_the_next_gradient_and_keeps_the_rest():
    problem, params, opt = made()
    problem.run(opt, params, problem.samples[:5])
    unit, r = opt.state[params[0]]["gradient_unit"].clone(), opt.diagnostics()["distance"]
    opt.restart()
    assert not opt.started
    backward(problem, opt, params, problem.samples[5])
    g = params[0].grad.clone()
    opt.step()
    assert opt.started
    assert torch.equal(opt.state[params[0]]["estimator"], g)
    expected = torch.hypot(unit * (5 / 6) ** 0.5, g * (1 / 6) ** 0.5)
    torch.testing.assert_close(opt.state[params[0]]["gradient_unit"], expected)
    assert opt.diagnostics()["distance"] >= r
    assert opt.diagnostics()["step"] == 6


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("when", [0, 7])
def test_what_is_not_finite_raises_and_nothing_has_changed(bad, when):
    problem, params, opt = made(weight_decay=0.1)
    twin_problem, twin_params, twin = made(weight_decay=0.1)
    for i, xi in enumerate(problem.samples):
        if i == when:
            before = everything(opt, params)
            backward(problem, opt, params, xi)
            params[2].grad.view(-1)[1] = bad
            with pytest.raises(FloatingPointError, match=r"\('c'\) is not finite; nothing has"):
                opt.step()
            assert_same(everything(opt, params), before)
            continue
        opt.step(problem.closure(opt, params, xi))
        twin.step(problem.closure(twin, twin_params, xi))
    assert_same(everything(opt, params), everything(twin, twin_params))


def test_a_second_evaluation_that_is_not_finite_leaves_a_pair_that_estimate_completes():
    runs = []
    for spoil in (True, False):
        problem, params, opt = made(correction=True)
        for i, xi in enumerate(problem.samples):
            if opt.started:
                backward(problem, opt, params, xi)
                opt.move()
            backward(problem, opt, params, xi)
            if spoil and i == 7:
                params[0].grad[0, 0] = float("nan")
                with pytest.raises(FloatingPointError, match="the step is pending"):
                    opt.estimate()
                backward(problem, opt, params, xi)
            opt.estimate()
        opt.eval()  # the average has counted the sample once
        runs.append(params)
    for a, b in zip(*runs):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
