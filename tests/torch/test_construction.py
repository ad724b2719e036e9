"""Construction, diagnostics, copies and hooks: what is refused, and what is told."""

import copy
import pickle

import numpy as np
import pytest
import torch
from problems_for_tests import backward, made
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stormplus import Storm, StormPlus
from stormplus.torch.kernels import Plain
from stormplus.torch.optimizer import StormOptimizer

P = [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be a finite number, at least 0, got -1.0"),
        ({"lr": float("nan")}, ValueError, "lr must be a finite number, at least 0, got nan"),
        ({"lr": "fast"}, ValueError, "lr must be a finite number, at least 0, got 'fast'"),
        ({"lr": torch.ones(2)}, ValueError, r"must have one element, got the shape \(2,\)"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be a finite number, at least 0"),
        ({"norm": "max"}, ValueError, "norm must be one of raw, mean, got 'max'"),
        ({"scope": "layer"}, ValueError, "scope must be one of global, group, tensor, got 'layer'"),
        ({"foreach": True, "fused": True}, ValueError, "ask for one of them"),
        ({"max_move": 0.0}, ValueError, "max_move must be a positive number or None"),
        ({"replay_rng": [3]}, TypeError, "list of torch.Generator, got 3"),
        ({"replay_rng": None}, TypeError, "list of torch.Generator, got None"),
        ({"max_move": "1"}, ValueError, "max_move must be a positive number or None"),
        ({"weight_decay": torch.ones(())}, ValueError, "weight_decay must be a finite number"),
        ({"params": [torch.ones(3, 1).expand(3, 4)]}, ValueError, "an expanded view"),
        ({"params": [torch.ones(2, dtype=torch.cfloat).conj()]}, ValueError, "clone"),
        ({"params": []}, ValueError, "empty parameter list"),
        ({"params": [{"params": []}]}, ValueError, "no parameter in them"),
        ({"params": [{"params": P, "lr": -2.0}]}, ValueError, "got -2.0"),
        ({"params": [torch.ones(2, dtype=torch.long)]}, TypeError, "got torch.int64"),
        ({"momentum": 0.9}, TypeError, "momentum"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        StormPlus(**{"params": P} | options)


def test_refused_group_leaves_no_trace():
    problem, params, opt = made(StormPlus)
    problem.run(opt, params, problem.samples[:2])
    with pytest.raises(ValueError, match="got -1"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(opt.param_groups) == 1
    problem.run(opt, params, problem.samples[2:])
    assert opt.diagnostics()["step"] == 10


def test_numpy_numbers_are_numbers():
    assert StormPlus(P, lr=np.float32(0.1)).param_groups[0]["lr"] == np.float32(0.1)


def test_closure_without_backward_is_refused():
    problem, params, opt = made(StormPlus)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step(lambda: problem.loss(params, problem.samples[0]))
    assert not opt.started


def test_global_hooks_fire_for_the_halves_too():
    problem, params, opt = made(StormPlus, samples=3)
    fired = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: fired.append("pre")),
        register_optimizer_step_post_hook(lambda *_: fired.append("post")),
    ]
    try:
        for xi in problem.samples:
            if opt.started:
                backward(problem, opt, params, xi)
                opt.move()
            backward(problem, opt, params, xi)
            opt.estimate()
    finally:
        for handle in handles:
            handle.remove()
    assert fired == ["pre", "post"] * 3


@pytest.mark.parametrize("half", ["move", "estimate"])
def test_interrupted_pass_leaves_an_optimizer_that_starts_anew(half, monkeypatch):
    # Ctrl-C between two batches of a pass: d is half of one thing and half of another.
    problem, params, opt = made(StormPlus)
    opt = StormPlus([{"params": params[:1]}, {"params": params[1:]}])
    problem.run(opt, params, problem.samples[:3])
    real, calls = getattr(Plain, half), []

    def interrupted(self, *args, **options):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(Plain, half, interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.step(problem.closure(opt, params, problem.samples[3]))
    assert not opt.started
    monkeypatch.undo()
    evaluations = []
    opt.step(problem.closure(opt, params, problem.samples[4], evaluations))
    assert len(evaluations) == 1
    assert all(torch.equal(opt.state[p]["estimator"], p.grad) for p in params)


def test_a_rule_of_ones_own():
    class Constant:
        def __call__(self, sums, g_sq, d_sq, t):
            return sums, 0.5 + 0 * g_sq, 0.1 + 0 * g_sq

    class Mine(StormOptimizer):
        rule = Constant()

    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = Mine([p])
    for g in (1.0, 2.0):
        for half in (opt.move, opt.estimate) if opt.started else (opt.estimate,):
            p.grad = torch.full((2,), g, dtype=torch.float64)
            half()
    # x = 1 - 0.1*1;  d = 2 + 0.5*(1 - 2)
    assert p.tolist() == pytest.approx([0.9, 0.9])
    assert opt.state[p]["estimator"].tolist() == [1.5, 1.5]
    assert opt.state_dict()["state"][0]["rule"] == 3


@pytest.mark.parametrize("name", ["theta", "w", "c", "smoothness"])
def test_storm_constants(name):
    with pytest.raises(ValueError, match=f"{name} must be a positive finite number, got -1"):
        Storm(P, **{name: -1})
    assert getattr(Storm(P, **{name: 0.25}).rule, name) == 0.25


def test_diagnostics_are_plain_floats():
    problem, params, opt = made(StormPlus)
    problem.run(opt, params)
    numbers = opt.diagnostics()
    assert set(numbers) == {
        "step", "gain", "step_size", "grad_norm", "estimator_norm", "sum_g_sq",
        "sum_d_sq_over_a", "grad_evaluations",
    }  # fmt: skip
    assert all(type(v) is float for v in numbers.values())
    true = sum(float(p.grad.square().sum()) for p in params) ** 0.5
    assert numbers["grad_norm"] == pytest.approx(true, rel=1e-12)


def test_diagnostics_of_scopes_are_totals_with_extremes():
    problem, params, opt = made(StormPlus, scope="tensor")
    problem.run(opt, params)
    numbers = opt.diagnostics()
    each = [float(p.grad.square().sum()) for p in params]
    assert numbers["grad_norm"] == pytest.approx(sum(each) ** 0.5, rel=1e-12)
    assert numbers["grad_norm_min"] == pytest.approx(min(each) ** 0.5, rel=1e-12)
    assert numbers["grad_norm_max"] == pytest.approx(max(each) ** 0.5, rel=1e-12)
    assert numbers["gain_min"] <= numbers["gain"] <= numbers["gain_max"]


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_carry_rule_and_options(make_copy):
    model = nn.Linear(3, 1)
    model, opt = make_copy((model, Storm(model.parameters(), theta=0.3, norm="mean")))
    x = torch.randn(4, 3)

    def closure():
        opt.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.step(closure)
    assert opt.rule.theta == 0.3
    assert opt.diagnostics()["step"] == 2


def test_repr_has_groups_and_no_tensors():
    _, _, opt = made(StormPlus)
    assert "StormPlus" in repr(opt)
    assert "lr: 1.0" in repr(opt)
