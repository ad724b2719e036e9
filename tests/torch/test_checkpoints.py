"""Copies, checkpoints and other interruptions of a run, which goes on as if nothing had been."""

import copy
import pickle

import pytest
import torch
from checkpoint_ways import dcp_load, dcp_save, through_dcp, through_flat_dcp, through_torch_save
from optimizers import (
    CASES,
    UNTUNED,
    assert_same,
    every,
    every_paired,
    everything,
    made,
    state_tensors,
    values,
)
from problems_for_tests import Network
from torch import nn
from torch.optim import lr_scheduler


def build(case, dtype, seed=0):
    """Two groups with a schedule."""
    model = nn.ParameterList(Network(seed).parameters(dtype))  # a module: names for dcp
    first, *rest = model
    opt = case([{"params": [first], "lr": 0.3}, {"params": rest}], lr=0.5, weight_decay=0.01)
    return model, opt, lr_scheduler.ExponentialLR(opt, 0.95)


def in_memory(model, opt, new_model, new_opt, tmp_path):
    new_model.load_state_dict(model.state_dict())
    new_opt.load_state_dict(opt.state_dict())


def in_inference_mode(*arguments):
    with torch.inference_mode():
        in_memory(*arguments)


def loaded(way, at_average=False, ready=False):
    """Into a new run. With `at_average` both are saved there; `ready` if the new one is there."""

    def interrupt(case, run, tmp_path):
        model, opt, schedule = run
        new = build(case, model[0].dtype, seed=9)
        new[0][0].requires_grad_(model[0].requires_grad)
        if at_average:
            opt.eval()
        if ready:
            new[1].eval()
        before, generation = everything(opt), new[1].generation
        way(model, opt, *new[:2], tmp_path)
        assert new[1].generation > generation
        new[2].load_state_dict(schedule.state_dict())
        for p in model:
            p.detach().fill_(7.0)  # no memory is shared
        opt.reset()
        if at_average:
            assert_same(values(new[0]), before[0])
            new[1].train()
        return new

    return interrupt


def shared(case, run, tmp_path):
    for tensor in state_tensors(run[1]).values():
        tensor.share_memory_()
    return run


def frozen(case, run, tmp_path):
    """As one half of a GAN is while the other is trained, or a model that is exported."""
    model, opt, _ = run
    for p in model:
        p.requires_grad_(False)
    opt.load_state_dict(opt.state_dict())
    if not case.paired:
        opt.eval()
        opt.train()
    return run


INTERRUPTIONS = {
    "copy": lambda case, run, tmp_path: copy.deepcopy(run),
    "pickle": lambda case, run, tmp_path: pickle.loads(pickle.dumps(run)),
    "shared memory": shared,
    "frozen": frozen,
    "memory": loaded(in_memory),
    "inference mode": loaded(in_inference_mode),
    "torch.save": loaded(through_torch_save),
    "dcp": loaded(through_dcp),
    "flat dcp": loaded(through_flat_dcp),
}
AT_AVERAGE = {
    "torch.save": loaded(through_torch_save, at_average=True),
    "torch.save, ready": loaded(through_torch_save, at_average=True, ready=True),
    "dcp, ready": loaded(through_dcp, at_average=True, ready=True),
}


def trained(case, dtype, tmp_path, interrupt=None, cut=None, between_halves=False):
    """With a first parameter that is frozen, frozen later, and unfrozen."""
    problem, run = Network(samples=16), build(case, dtype)
    for i, xi in enumerate(problem.samples):

        def evaluate():
            problem.closure(run[1], list(run[0]), xi)()

        def freeze():
            run[0].requires_grad_(True)
            run[0][0].requires_grad_(not 5 <= i < 10)

        freeze()
        if i == cut and not between_halves:
            run = interrupt(case, run, tmp_path)
            freeze()
        if i == cut and between_halves:
            evaluate()
            run[1].move()
            run = interrupt(case, run, tmp_path)
            evaluate()
            run[1].estimate()
        else:
            case.step(run[1], evaluate)
        run[2].step()
    return run[1]


def assert_goes_on(case, dtype, tmp_path, *arguments):
    whole, found = trained(case, dtype, tmp_path), trained(case, dtype, tmp_path, *arguments)
    assert_same(everything(found), everything(whole))
    assert found.diagnostics() == whole.diagnostics()


dtypes = [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.long)]


@every
@pytest.mark.parametrize("name", INTERRUPTIONS)
@pytest.mark.parametrize("dtype", dtypes, ids=str)
@pytest.mark.parametrize("cut", [3, 7, 10, 12])
def test_a_run_that_is_interrupted_goes_on_bit_by_bit(case, name, dtype, cut, tmp_path):
    assert_goes_on(case, dtype, tmp_path, INTERRUPTIONS[name], cut)


@every_paired
@pytest.mark.parametrize("name", [name for name in INTERRUPTIONS if name != "frozen"])
def test_a_pair_that_is_interrupted_goes_on_bit_by_bit(case, name, tmp_path):
    assert_goes_on(case, torch.bfloat16, tmp_path, INTERRUPTIONS[name], 11, True)


@pytest.mark.parametrize("name", AT_AVERAGE)
def test_a_run_that_is_saved_at_the_average_goes_on_bit_by_bit(name, tmp_path):
    assert_goes_on(UNTUNED, torch.bfloat16, tmp_path, AT_AVERAGE[name], 11)


def test_dcp_refuses_a_state_saved_at_the_average_unless_eval_was_called(tmp_path):
    with pytest.raises(ValueError, match=r"Call opt.eval\(\) before you load"):
        trained(UNTUNED, torch.float64, tmp_path, loaded(through_dcp, at_average=True), 11)


@every
def test_reset_is_a_new_beginning_from_here(case):
    problem, params, opt = made(case, lr=0.5)
    case.train(problem, opt, params, problem.samples[:4])
    generation, groups = opt.generation, opt.param_groups
    opt.reset()
    assert opt.generation == generation + 1
    assert opt.param_groups is groups  # wrappers hold it
    fresh = case([nn.Parameter(p.detach().clone()) for p in params], lr=0.5)
    assert_same(everything(opt), everything(fresh))
    for optimizer in (opt, fresh):
        case.train(problem, optimizer, optimizer.parameters(), problem.samples[4:])
    assert_same(everything(opt), everything(fresh))


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
    assert_same(values(model), values(new_model))


@every
def test_the_users_hooks_of_loading_see_all_and_have_the_last_word(case):
    problem, params, opt = made(case)
    case.train(problem, opt, params)
    seen = []
    opt.register_state_dict_post_hook(
        lambda _, saved: seen.append(numbers(saved)["grad_evaluations"])
    )
    _, others, twin = made(case)
    name = case.buffers[0]

    def doubled(_, saved):
        saved["state"][0][name] = 2 * saved["state"][0][name]
        return saved

    def sevens(loaded):
        loaded.state[others[1]][name] = torch.full_like(others[1], 7.0)

    twin.register_load_state_dict_pre_hook(doubled)
    twin.register_load_state_dict_post_hook(sevens)
    twin.load_state_dict(opt.state_dict())
    assert seen == [opt.grad_evaluations]
    assert torch.equal(twin.state[others[0]][name], 2 * opt.state[params[0]][name])
    assert (twin.state[others[1]][name] == 7).all()


# -- states that are refused ---------------------------------------------------------------------


def numbers(saved):
    return next(entry["scalars"] for entry in saved["state"].values() if "scalars" in entry)


def state_of(case, tmp_path):
    problem, params, opt = made(case, samples=3)
    case.train(problem, opt, params)
    return opt.state_dict()


def state_of_adam(case, tmp_path):
    problem, params, opt = made(lambda params: torch.optim.Adam(params))
    problem.run(opt, params, problem.samples[:2])
    return opt.state_dict()


def state_of_the_other_kind(case, tmp_path):
    return state_of(CASES[0] if case is UNTUNED else UNTUNED, tmp_path)


def state_of_another_rule(case, tmp_path):
    return state_of(next(other for other in CASES if other.cls is not case.cls), tmp_path)


def newer_state(case, tmp_path):
    saved = state_of(case, tmp_path)
    numbers(saved)["format"] = 99
    return saved


def state_without_an_option(case, tmp_path):
    saved = state_of(case, tmp_path)
    del saved["param_groups"][0]["maximize"]
    return saved


def state_loaded_in_part(case, tmp_path):
    """dcp silently drops numbers under integer keys, which opt.state_dict() has."""
    dcp_save({"opt": state_of(case, tmp_path)}, tmp_path / "dcp")
    loaded = {"opt": made(case)[2].state_dict()}
    dcp_load(loaded, tmp_path / "dcp")
    return loaded["opt"]


def state_of_shapes(*shapes):
    def make(case, tmp_path):
        return case([nn.Parameter(torch.ones(shape)) for shape in shapes]).state_dict()

    return make


REFUSED = {
    "Adam": (state_of_adam, "exp_avg"),
    "weights": (lambda case, tmp_path: {"weights": 1}, "not an optimizer state"),
    "newer": (newer_state, "format 99"),
    "option": (state_without_an_option, "no maximize"),
    "in part": (state_loaded_in_part, r"loaded in part.*get_state_dict\(model, opt\)"),
    "kind": (state_of_the_other_kind, "saved with rule="),
    "rule": (state_of_another_rule, "saved with rule="),
    "shapes": (state_of_shapes(20, 5, 15), r"the shape \(20,\), the parameter \(5, 4\)"),
    "count": (state_of_shapes((5, 4)), "loaded state dict"),
}


@every
@pytest.mark.parametrize("name", REFUSED)
def test_other_states_are_refused_and_nothing_is_lost(case, name, tmp_path):
    problem, params, opt = made(case)
    case.train(problem, opt, params, problem.samples[:5])
    before, numbers, generation = everything(opt), opt.diagnostics(), opt.generation
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(make(case, tmp_path))
    assert_same(everything(opt), before)
    assert (opt.diagnostics(), opt.generation) == (numbers, generation)
