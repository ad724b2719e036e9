"""Checkpoints of a whole run through torch.distributed.checkpoint; the rest is in the contract."""

import pytest
import torch
from checkpoint_ways import dcp_load, dcp_save, through_dcp
from optimizers import CASES, every, made
from problems_for_tests import Network
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stormplus import StormPlus, UniformIterate, scaled_step

pytestmark = pytest.mark.usefixtures("uncompiled")
OTHERS = ("schedule", "scaler", "iterate")


def parts(samples):
    """Model, optimizer, schedule, scaler and uniform iterate after some samples."""
    problem = Network(samples=8)
    model = nn.ParameterList(problem.parameters(torch.float32))
    opt = StormPlus(model.parameters())
    made = {
        "model": model,
        "opt": opt,
        "schedule": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
        "iterate": UniformIterate(model, seed=samples),
    }
    for xi in problem.samples[:samples]:

        def closure():
            opt.zero_grad()
            loss = problem.loss(list(model), xi)
            made["scaler"].scale(loss).backward()
            return loss

        scaled_step(opt, made["scaler"], closure)
        made["schedule"].step()
        made["iterate"].update()
    return made


def states(made):
    weights, state = get_state_dict(made["model"], made["opt"])
    return {"model": weights, "opt": state} | {name: made[name].state_dict() for name in OTHERS}


def test_all_parts_of_a_run_through_dcp(tmp_path):
    trained, fresh = parts(6), parts(0)
    dcp_save(states(trained), tmp_path / "dcp")
    loaded = states(fresh)
    dcp_load(loaded, tmp_path / "dcp")
    set_state_dict(
        fresh["model"],
        fresh["opt"],
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["opt"],
    )
    for name in OTHERS:
        fresh[name].load_state_dict(loaded[name])
    assert fresh["opt"].diagnostics() == trained["opt"].diagnostics()
    assert fresh["scaler"].get_scale() == trained["scaler"].get_scale() > 4.0
    assert fresh["schedule"].get_last_lr() == trained["schedule"].get_last_lr()
    assert fresh["iterate"].chosen == trained["iterate"].chosen
    for a, b in zip(fresh["iterate"].state_dict()["kept"], trained["iterate"].state_dict()["kept"]):
        assert torch.equal(a, b)


@every
def test_a_state_that_dcp_loads_in_part_is_refused(case, tmp_path):
    # dcp drops numbers under integer keys, which opt.state_dict() has: without a word of its own
    problem, params, opt = made(case, samples=3)
    case.train(problem, opt, params)
    dcp_save({"opt": opt.state_dict()}, tmp_path / "dcp")
    fresh = made(case)[2]
    loaded = {"opt": fresh.state_dict()}
    dcp_load(loaded, tmp_path / "dcp")
    with pytest.raises(ValueError, match=r"loaded in part.*get_state_dict\(model, opt\)"):
        fresh.load_state_dict(loaded["opt"])


def test_the_table_has_every_public_optimizer():
    import stormplus.torch as package

    public = [getattr(package, name) for name in package.__all__]
    abstract = (package.BaseOptimizer, package.PairedOptimizer)
    optimizers = {
        cls
        for cls in public
        if isinstance(cls, type) and issubclass(cls, package.BaseOptimizer) and cls not in abstract
    }
    assert optimizers <= {case.cls for case in CASES}


@every
def test_dcp_loads_with_more_layers_frozen(case, tmp_path):
    """Layers are frozen from the first on, and torch's checkpoint leaves out what is frozen."""

    def make(frozen):
        problem, params, opt = made(case, samples=8)
        for p in params[:frozen]:
            p.requires_grad_(False)
        return problem, nn.ParameterList(params), opt

    problem, model, opt = make(0)
    case.train(problem, opt, list(model), problem.samples[:5])
    _, new_model, new_opt = make(1)
    through_dcp(model, opt, new_model, new_opt, tmp_path)
    assert new_opt.diagnostics() == opt.diagnostics()
    model[0].requires_grad_(False)
    for each, theirs in ((opt, model), (new_opt, new_model)):
        case.train(problem, each, list(theirs), problem.samples[5:])
    for p, q in zip(model, new_model, strict=True):
        assert torch.equal(p, q)


@every
def test_a_state_that_is_loaded_in_inference_mode_goes_on(case):
    problem, params, opt = made(case, samples=8)
    case.train(problem, opt, params, problem.samples[:5])
    _, others, twin = made(case, samples=8)
    with torch.inference_mode():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
        twin.load_state_dict(opt.state_dict())
    for each, theirs in ((opt, params), (twin, others)):
        case.train(problem, each, theirs, problem.samples[5:])
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
