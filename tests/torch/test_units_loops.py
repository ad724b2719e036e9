"""Untuned in ordinary loops, and what is for pairs of gradients refuses it."""

import warnings

import pytest
import torch
from problems_for_tests import Network, backward
from torch import nn

from stormplus import StormPlus, Untuned, same_sample, scaled_step, verify_closure
from stormplus.torch.optimizer import takes_pairs


def made(samples=12, **options):
    problem = Network(samples=samples)
    params = problem.parameters()
    return problem, params, Untuned(params, **options)


@pytest.mark.parametrize("name", ["distance", "gradient"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", torch.ones(2)])
def test_units_that_make_no_sense(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive number, or None"):
        Untuned(Network().parameters(), **{name: value})


@pytest.mark.parametrize(
    "option", [{"fused": True}, {"foreach": False}, {"norm": "mean"}, {"replay_rng": False},
               {"max_move": 0.1}],
    ids=str,
)  # fmt: skip
def test_options_of_pairs_need_a_correction(option):
    (name,) = option
    with pytest.raises(TypeError, match=f"{name}: only with correction=True"):
        Untuned(Network().parameters(), **option)
    Untuned(Network().parameters(), correction=True, **option)


def test_options_of_pairs_in_a_group_need_a_correction():
    problem, params, opt = made()
    late = {"params": [nn.Parameter(torch.ones(2))], "max_move": 0.1}
    with pytest.raises(TypeError, match="max_move: only with correction=True"):
        opt.add_param_group(late)
    assert len(opt.param_groups) == 1
    with pytest.raises(TypeError, match="fused: only with correction=True"):
        Untuned([{"params": params, "fused": True}])


@pytest.mark.parametrize("option", [{"lr": -1}, {"weight_decay": -1}, {"scope": "layer"}], ids=str)
def test_the_siblings_options_are_checked_as_theirs(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Untuned(Network().parameters(), **option)


def test_halves_of_a_pair_need_a_correction():
    problem, params, opt = made()
    backward(problem, opt, params, problem.samples[0])
    for half in (opt.move, opt.estimate):
        with pytest.raises(RuntimeError, match=r"half of a pair .*call step\(\)"):
            half()
    assert not opt.started


@pytest.mark.parametrize("opt_of", [Untuned, torch.optim.SGD])
def test_what_makes_pairs_refuses_who_takes_one(opt_of):
    params = [nn.Parameter(torch.ones(2))]
    opt, calls = opt_of(params), []
    scaler = torch.amp.GradScaler("cpu")
    not_needed = "takes one gradient a step: {} is not needed, call {} as usual"

    def closure():
        calls.append(None)

    for what, instead, call in (
        ("same_sample", r"opt.step\(\)", lambda: same_sample(opt, nn.Linear(1, 1))),
        ("verify_closure", r"opt.step\(\)", lambda: verify_closure(opt, closure)),
        ("scaled_step", r"scaler.step\(opt\)", lambda: scaled_step(opt, scaler, closure)),
    ):
        with pytest.raises(ValueError, match=not_needed.format(what, instead)):
            call()
    assert not calls


def test_who_takes_pairs():
    params = [nn.Parameter(torch.ones(2))]
    assert takes_pairs(StormPlus(params))
    assert takes_pairs(Untuned(params, correction=True))
    assert not takes_pairs(Untuned(params))
    assert not takes_pairs(torch.optim.SGD(params))
    assert not takes_pairs(None)


def test_with_a_correction_everything_for_pairs_works():
    problem, params, opt = made(correction=True)
    problem.run(opt, params, problem.samples[:2])
    closure = problem.closure(opt, params, problem.samples[2])
    verify_closure(opt, closure)
    opt.step(same_sample(opt)(closure))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def scaled():
        opt.zero_grad()
        loss = problem.loss(params, problem.samples[3])
        scaler.scale(loss).backward()
        return loss

    scaled_step(opt, scaler, scaled)
    assert opt.diagnostics()["grad_evaluations"] == 7


def test_grad_scaler_in_the_ordinary_way():
    # The scale is a power of two: unscaled gradients are exact.
    problem, params, opt = made()
    other, others, twin = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, xi in enumerate(problem.samples):
        opt.zero_grad()
        scaler.scale(problem.loss(params, xi)).backward()
        if i == 5:
            params[1].grad[0] = float("inf")
        scaler.step(opt)
        scaler.update()
        if i != 5:
            twin.step(other.closure(twin, others, xi))
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, b) for a, b in zip(params, others))
    assert opt.diagnostics() == twin.diagnostics()


@pytest.mark.parametrize("correction", [False, True])
def test_a_scheduler_sets_the_lr_and_nothing_warns(correction):
    problem, params, opt = made(correction=correction)
    _, others, twin = made(correction=correction)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for i, xi in enumerate(problem.samples):
            opt.step(problem.closure(opt, params, xi))
            schedule.step()
            twin.param_groups[0]["lr"] = 0.5**i
            twin.step(problem.closure(twin, others, xi))
    assert all(torch.equal(a, b) for a, b in zip(params, others))


def test_a_tensor_lr_is_a_number():
    problem, params, opt = made(lr=torch.tensor(0.25))
    _, others, twin = made(lr=0.25)
    problem.run(opt, params)
    problem.run(twin, others)
    assert all(torch.equal(a, b) for a, b in zip(params, others))


def test_groups_have_their_own_lr_and_decay():
    problem, params, _ = made(samples=1)
    opt = Untuned([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}])
    problem.run(opt, params)
    assert torch.equal(params[0], torch.tensor(problem.x0[0]))
    assert not torch.equal(params[1], torch.tensor(problem.x0[1]))


@pytest.mark.parametrize("correction", [False, True])
def test_step_hooks_run_once_a_step(correction):
    problem, params, opt = made(correction=correction)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    problem.run(opt, params)
    assert seen == ["before", "after"] * len(problem.samples)


def test_the_gradient_is_left_as_it_is():
    problem, params, opt = made(weight_decay=0.1, maximize=True)
    backward(problem, opt, params, problem.samples[0])
    before = [p.grad.clone() for p in params]
    opt.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before))
    opt.zero_grad(set_to_none=False)
    assert all(opt.state[p]["estimator"].any() for p in params)


def test_memory_is_four_buffers_and_scalars():
    p = nn.Parameter(torch.randn(1000, 1000))
    for options, buffers in (({}, 4), ({"average": False}, 3), ({"correction": True}, 3)):
        opt = Untuned([p], **options)
        tensors = [v for v in opt.state[p].values() if torch.is_tensor(v)]
        assert sum(t.nbytes for t in tensors) == pytest.approx(buffers * p.nbytes, rel=0.01)
