"""Copies, resets and checkpoints of every optimizer: a resumed run is the run."""

import copy
import pickle

import pytest
import torch
from checkpoint_ways import dcp_load, dcp_save, through_dcp, through_flat_dcp, through_torch_save
from optimizers import CASES, UNTUNED, assert_same, every, everything, made, values
from problems_for_tests import Network
from torch import nn
from torch.optim import lr_scheduler

COPIES = {"copy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


@every
@pytest.mark.parametrize("name", COPIES)
def test_copies_go_on_alike_and_apart(case, name):
    problem, params, opt = made(case, weight_decay=0.1)
    case.train(problem, opt, params, problem.samples[:6])
    others, twin = COPIES[name]((params, opt))
    for optimizer, tensors in ((opt, params), (twin, others)):
        case.train(problem, optimizer, tensors, problem.samples[6:])
    assert_same(everything(opt), everything(twin))
    assert opt.diagnostics() == twin.diagnostics()
    assert twin.diagnostics()["step"] == 12


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


def in_memory(model, opt, new_model, new_opt, tmp_path):
    new_model.load_state_dict(model.state_dict())
    new_opt.load_state_dict(opt.state_dict())


def in_inference_mode(*arguments):
    with torch.inference_mode():
        in_memory(*arguments)


WAYS = {
    "memory": in_memory,
    "inference mode": in_inference_mode,
    "torch.save": through_torch_save,
    "dcp": through_dcp,
    "flat dcp": through_flat_dcp,
}
dtypes = [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.long)]


@every
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", dtypes, ids=str)
def test_a_resumed_run_is_the_run(case, way, dtype, tmp_path):
    # With a first parameter that is frozen, frozen later, and unfrozen; and a schedule.
    problem = Network(samples=20)

    def build(seed=0):
        model = nn.ParameterList(Network(seed).parameters(dtype))  # a module: names for dcp
        first, *rest = model
        groups = [{"params": [first], "lr": 0.3}, {"params": rest}]
        opt = case(groups, lr=0.5, weight_decay=0.01)
        return model, opt, lr_scheduler.ExponentialLR(opt, 0.95)

    def go_on(model, opt, schedule, samples):
        for i, xi in samples:
            model[0].requires_grad_(not 5 <= i < 10)
            case.step(opt, problem.closure(opt, list(model), xi))
            schedule.step()

    samples = list(enumerate(problem.samples))
    whole = build()
    go_on(*whole, samples)
    for cut in (3, 7, 10, 12):
        model, opt, schedule = build()
        go_on(model, opt, schedule, samples[:cut])
        resumed = build(seed=9)
        for net in (model, resumed[0]):
            net[0].requires_grad_(not 5 <= cut < 10)
        generation, before = resumed[1].generation, everything(opt)
        WAYS[way](model, opt, *resumed[:2], tmp_path / str(cut))
        assert resumed[1].generation > generation
        resumed[2].load_state_dict(schedule.state_dict())
        go_on(*resumed, samples[cut:])
        assert_same(everything(resumed[1]), everything(whole[1]))
        assert resumed[1].diagnostics() == whole[1].diagnostics()
        assert_same(everything(opt), before)  # loading has not shared memory


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
    assert [scalars["grad_evaluations"] for scalars in seen] == [opt.grad_evaluations]
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
