"""Parameters that are added, removed, changed and frozen during a run, for every optimizer."""

import pytest
import torch
from optimizers import assert_same, every, every_paired, everything, made, per_tensor, values
from torch import nn


def parameter(*numbers):
    return nn.Parameter(torch.tensor(numbers, dtype=torch.float64))


def constant(case, opt, params, steps=3):
    """Steps with gradients that depend on the parameters' places in the test alone."""
    rows = [
        torch.randn(steps, *p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
        for i, p in enumerate(params)
    ]
    case.descend(opt, params, list(zip(*rows)))


@every
@pytest.mark.parametrize("size", [3, 5])
def test_a_parameter_that_was_resized_is_refused(case, size):
    p, q = parameter(1.0, 2.0, 3.0, 4.0), parameter(5.0)
    opt = case([p, q])
    constant(case, opt, [p, q])
    before = everything(opt)
    p.data, p.grad = torch.ones(size, dtype=p.dtype), None
    with pytest.raises(ValueError, match=r"shape \(4,\): it was resized. Call opt.reset"):
        constant(case, opt, [p, q])
    torch.testing.assert_close(p.detach(), torch.ones(size, dtype=p.dtype), rtol=0, atol=0)
    assert_same(q.detach(), before[0][1])
    opt.reset()
    constant(case, opt, [p, q])
    assert bool((p != 1).all())


@every
def test_a_gradient_of_another_shape_is_refused(case):
    p = parameter(1.0, 2.0, 3.0, 4.0)
    opt = case([p])
    p.grad = torch.ones_like(p)
    p.data = torch.ones(7, dtype=p.dtype)
    opt.reset()
    with pytest.raises(RuntimeError, match=r"has the shape \(4,\).*zero_grad"):
        case.step(opt, lambda: None)
    assert_same(p.detach(), torch.ones(7, dtype=p.dtype))


@every
def test_a_parameter_that_is_taken_out_of_a_group_takes_its_numbers_along(case):
    """What remains goes on as if the parameter were frozen."""
    runs = []
    for way in ("out", "frozen"):
        params = [parameter(10.0, -20.0), parameter(0.01, 0.02, 0.03), parameter(-1.0)]
        opt = case([{"params": params[:1]}, {"params": params[1:]}], lr=0.3)
        constant(case, opt, params)
        params[0].requires_grad_(False)
        params[0].grad = None
        if way == "out":
            del opt.param_groups[0]
        constant(case, opt, params[1:])
        runs.append((values(params), opt))
    (ours, opt), (expected, frozen) = runs
    assert_same(ours, expected)
    # It saves and loads as what it is now, and an empty group that is added does no harm.
    twin = case([{"params": params[1:]}], lr=0.3)
    twin.load_state_dict(opt.state_dict())
    assert len(twin.state) == len(opt.state) == 2
    again = parameter(10.0, -20.0)
    opt.add_param_group({"params": [again]})
    constant(case, opt, [*opt.parameters()[:2], again])
    assert bool((again != parameter(10.0, -20.0)).all())


@every
def test_a_parameter_that_comes_back_starts_over(case):
    p, q = parameter(1.0, 2.0), parameter(3.0)
    opt = case([{"params": [q]}, {"params": [p]}])
    constant(case, opt, [q, p])
    group = opt.param_groups.pop()
    opt.state_dict()
    opt.add_param_group({"params": group["params"]})
    assert not opt.state[p]["started"]
    if not case.paired:
        assert per_tensor(opt, "step").tolist() == [3, 0]


@every
def test_a_parameter_that_is_put_into_a_group_by_hand_joins(case):
    p, q = parameter(1.0, 2.0), parameter(3.0, 4.0)
    opt = case([p])
    constant(case, opt, [p])
    opt.param_groups[0]["params"].append(q)
    constant(case, opt, [p, q])
    assert bool((q != parameter(3.0, 4.0)).all())
    new = parameter(5.0, 6.0, 7.0)
    opt.param_groups[0]["params"][0] = new
    constant(case, opt, [new, q])
    assert bool((new != parameter(5.0, 6.0, 7.0)).all())
    assert p not in opt.state
    assert len(opt.state_dict()["state"]) == 2


@every
@pytest.mark.parametrize("saves", ["state_dict", "load_state_dict", "eval"])
def test_a_model_that_is_frozen_while_no_step_is_taken_goes_on_as_if_not(case, saves):
    """As one half of a GAN is, or a model that is exported."""
    runs = []
    for interrupted in (True, False):
        problem, params, opt = made(case)
        case.train(problem, opt, params, problem.samples[:6])
        if interrupted:
            for p in params:
                p.requires_grad_(False)
            if saves == "eval" and not case.paired:
                before = values(params)
                opt.eval()
                assert all(bool((p != q).any()) for p, q in zip(params, before))
                opt.train()
                assert_same(values(params), before)
            saved = opt.state_dict()
            if saves == "load_state_dict":
                opt.load_state_dict(saved)
            for p in params:
                p.requires_grad_(True)
        case.train(problem, opt, params, problem.samples[6:])
        runs.append(everything(opt))
    assert_same(*runs)


@every
def test_what_others_keep_in_the_state_stays(case):
    p = parameter(1.0, 2.0)
    opt = case([p])
    opt.state["mine"] = {"n": 1}
    opt.state["count"] = 1
    constant(case, opt, [p])
    opt.add_param_group({"params": [parameter(3.0)]})
    assert opt.state["mine"] == opt.state_dict()["state"]["mine"] == {"n": 1}
    assert opt.state["count"] == opt.state_dict()["state"]["count"] == 1


@every
def test_a_reset_that_is_refused_changes_nothing(case):
    p = parameter(1.0, 2.0)
    opt = case([p])
    constant(case, opt, [p])
    before, groups = everything(opt), opt.param_groups
    groups[0]["weight_decay"] = -1.0
    with pytest.raises(ValueError, match="weight_decay must be"):
        opt.reset()
    assert_same(everything(opt), before)
    groups[0]["weight_decay"] = 0.0
    opt.reset()
    assert opt.param_groups is groups  # wrappers hold it
    assert len(groups) == 1


@every
def test_a_parameter_put_in_by_hand_has_no_name(case):
    p, q = parameter(1.0, 2.0), parameter(3.0)
    opt = case([("first", p)])
    opt.param_groups[0]["params"].append(q)
    with pytest.raises(FloatingPointError, match=r"parameter 1 of group 0, shape \(1,\)"):
        case.descend(opt, [p, q], [[torch.ones_like(p), torch.full_like(q, torch.nan)]])


@every
@pytest.mark.parametrize("way", ["step", "state_dict"])
def test_an_emptied_state_is_an_error_that_says_what_to_do(case, way):
    p = parameter(1.0, 2.0)
    opt = case([p])
    constant(case, opt, [p])
    held = p.detach().clone()
    opt.state.clear()
    with pytest.raises(RuntimeError, match=r"opt.state was emptied or edited: call opt.reset\(\)"):
        constant(case, opt, [p]) if way == "step" else opt.state_dict()
    assert_same(p.detach(), held)
    opt.reset()
    constant(case, opt, [p])
    assert opt.diagnostics()["step"] == 3


@every_paired
def test_only_parameters_that_have_had_a_gradient_have_an_estimator(case):
    p, q, other = parameter(1.0, 2.0), parameter(3.0), parameter(4.0)
    opt = case([p, q])
    case.descend(opt, [p, q], [[torch.ones_like(p), None]])
    assert [opt.has_estimator(t) for t in (p, q, other)] == [True, False, False]


# -- other layouts -------------------------------------------------------------------------------


FORMATS = [torch.contiguous_format, torch.channels_last]


@every
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("formats", [FORMATS, FORMATS[::-1]], ids=str)
def test_a_model_that_changes_its_layout_goes_on_as_it_would_have(case, formats, loads):
    """With `.to(memory_format=...)` between two steps, or between saving and loading."""
    runs = []
    for changes in (True, False):
        model = nn.Conv2d(4, 6, 3, dtype=torch.float64).to(memory_format=formats[0])
        for p, start in zip(model.parameters(), (0.3, -0.2)):
            nn.init.constant_(p, start)
        params = list(model.parameters())
        opt = case(params)
        constant(case, opt, params)
        if changes:
            saved = opt.state_dict()
            model.to(memory_format=formats[1])
            if loads:
                opt = case(params)
                opt.load_state_dict(saved)
            opt.zero_grad()
        constant(case, opt, params)
        runs.append(values(params))
        for name in case.buffers[:2]:
            assert opt.state[params[0]].get(name, params[0]).stride() == params[0].stride()
    torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)
