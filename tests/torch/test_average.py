"""The average of Untuned: eval() shows it, train() brings the parameters back."""

import copy
import warnings

import pytest
import torch
from torch import nn

from stormplus import Untuned
from tests.torch.optimizers import UNTUNED, Run, assert_same, noise, values

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def test_a_hook_that_swaps_the_average_in_while_saving_keeps_the_iterate():
    p = nn.Parameter(torch.ones(3))
    opt = Untuned([p])
    UNTUNED.descend(opt, [p], [[g] for g in noise(3, 3, dtype=F32)])
    iterate = p.detach().clone()
    opt.register_state_dict_pre_hook(lambda opt: opt.eval())
    saved = opt.state_dict()
    assert opt.at_average
    assert not torch.equal(p, iterate)
    assert_same(saved["state"][0]["iterate"], iterate)
    opt.train()
    assert_same(p.detach(), iterate)


def written(params, value):
    with torch.no_grad():
        for p in params:
            p.copy_(value(p))


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_eval_shows_the_average_and_train_brings_the_parameters_back_exactly(dtype):
    run, undisturbed = Run(UNTUNED, dtype=dtype), Run(UNTUNED, dtype=dtype).train()
    opt, params = run.opt, run.params
    for i in range(12):
        run.train(i, i + 1)
        y = values(params)
        opt.eval()
        opt.eval()
        assert opt.at_average
        for p, q in zip(params, y):
            wide = opt.state[p].get("master", q)
            average = (wide - 0.1 * opt.state[p]["z_minus_x"]).to(dtype)
            torch.testing.assert_close(p.detach(), average)
        opt.train()
        opt.train()
        assert not opt.at_average
        assert_same(values(params), y)
    assert_same(run.everything(), undisturbed.everything())


def test_a_step_without_any_gradient_changes_nothing():
    run = Run(UNTUNED).train(0, 3)
    run.opt.zero_grad()
    before = run.everything()
    run.opt.step()
    assert_same(run.everything(), before)


def test_steps_at_the_average_are_refused():
    run, calls = Run(UNTUNED).train(0, 3), []
    run.opt.eval()
    x = values(run.params)
    with pytest.raises(RuntimeError, match=r"opt.train"):
        run.opt.step(lambda: calls.append(None))
    assert not calls
    assert_same(values(run.params), x)


def test_weights_that_are_loaded_before_the_first_step_stay():
    run = Run(UNTUNED)
    before = values(run.params)
    run.opt.eval()  # as a validation before training
    assert_same(values(run.params), before)
    written(run.params, lambda p: torch.full_like(p, 2.0))
    run.opt.train()
    assert all((p == 2).all() for p in run.params)
    run.train()
    assert run.opt.state[run.params[0]]["initial_sample"].eq(2).all()


@pytest.mark.parametrize("change", [1.0, 0.0])  # the best model of a run is often the last one
def test_train_warns_if_it_overwrites_weights_that_were_loaded_at_the_average(change, recwarn):
    run = Run(UNTUNED, dtype=BF16).train(0, 3)
    x = values(run.params)
    run.opt.eval()
    written(run.params, lambda p: p + change)
    assert run.opt.overwritten == bool(change)
    run.opt.train()
    assert len(recwarn) == bool(change)
    assert_same(values(run.params), x)


def test_eval_and_train_leave_a_frozen_parameter_alone(recwarn):
    run = Run(UNTUNED).train()
    (frozen, *others), opt = run.params, run.opt
    frozen.requires_grad_(False)
    UNTUNED.descend(opt, others, [[torch.ones_like(p) for p in others]])
    before = frozen.detach().clone()
    opt.eval()
    assert_same(frozen.detach(), before)
    written([frozen], lambda p: p + 1)
    opt.train()
    assert_same(frozen.detach(), before + 1)
    assert not recwarn


def test_weights_that_were_loaded_at_the_average_are_warned_of_after_a_group_was_added():
    run = Run(UNTUNED).train()
    run.opt.eval()
    written(run.params, lambda p: p + 1)
    run.opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.warns(UserWarning, match="written to after"):
        run.opt.train()


@pytest.mark.parametrize("saved_at_average", [False, True])
@pytest.mark.parametrize("copied", [False, True])  # by Lightning, after loading a checkpoint
def test_a_state_that_is_loaded_at_the_average_belongs_to_the_weights_there(
    saved_at_average, copied
):
    run = Run(UNTUNED).train(0, 3)
    x, saved = values(run.params), run.opt.state_dict()
    run.opt.eval()
    run.opt.load_state_dict(run.opt.state_dict() if saved_at_average else saved)
    if copied:
        for p in run.params:
            run.opt.state[p] = copy.deepcopy(run.opt.state[p])
    written(run.params, lambda p: p + 1)
    there = values(run.params)
    run.opt.train()  # without a warning
    assert_same(values(run.params), x if saved_at_average else there)
    if saved_at_average:
        whole = Run(UNTUNED).train(0, 5)
        assert_same(run.train(3, 5).everything(), whole.everything())


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", ["nothing", "unfreeze", "double"])
def test_a_validation_in_inference_mode(steps, change):
    """Tensors that eval() creates there must be writable in later steps."""
    ends = []
    for mode in (torch.inference_mode, torch.no_grad):
        run = Run(UNTUNED, samples=8, dtype=F32)
        run.params[0].requires_grad_(change != "unfreeze")
        run.train(0, steps)
        run.params[0].requires_grad_(True)
        for p in run.params:
            p.data = p.data.to(F64 if change == "double" else F32)
        with mode():
            run.opt.eval()
            run.opt.train()
        ends.append(values(run.train(steps).params))
    assert_same(*ends)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("at_average", [True, False])
def test_weights_of_the_average_with_a_state_of_the_iterate_are_warned_of(dtype, at_average):
    run, resumed = Run(UNTUNED, dtype=dtype).train(0, 8), Run(UNTUNED, dtype=dtype)
    resumed.opt.load_state_dict(run.opt.state_dict())
    if at_average:
        run.opt.eval()
    resumed.copy_weights(run)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        resumed.train(8, 10)
    # Once, and at the line that calls step().
    expected = [UNTUNED.step.__code__.co_filename] if at_average else []
    assert [warning.filename for warning in given] == expected


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("way", ["converted", "loaded"])
def test_the_average_of_weights_that_were_wider_before(dtype, way):
    """Their float32 copy holds nothing yet."""
    p = nn.Parameter(noise(3, 4, dtype=F32))
    opt = Untuned([p])
    UNTUNED.descend(opt, [p], [[g] for g in noise(20, 3, 4, seed=1, dtype=F32)])
    z_minus_x = opt.state[p]["z_minus_x"].clone()
    if way == "converted":
        p.data = p.data.to(dtype)
        opt.state_dict()
    else:
        saved, p = opt.state_dict(), nn.Parameter(p.detach().to(dtype))
        opt = Untuned([p])
        opt.load_state_dict(saved)
    y = p.detach().float()
    opt.eval()
    average = (y - 0.1 * z_minus_x).to(dtype)
    torch.testing.assert_close(p.detach(), average, rtol=0.01, atol=0.001)
    opt.train()
    assert_same(p.detach(), y.to(dtype))
