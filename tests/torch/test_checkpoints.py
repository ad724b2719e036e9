"""Checkpoints of a whole run through torch.distributed.checkpoint; the rest is in the contract."""

import pytest
import torch
from checkpoint_ways import dcp_load, dcp_save, through_dcp
from optimizers import CASES, every, made
from torch import nn


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
    assert new_opt.grad_evaluations == opt.grad_evaluations
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
