"""Copies, checkpoints and other interruptions: the run goes on as if nothing had happened."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import lr_scheduler

from stormplus import Storm, StormPlus, Untuned
from stormplus.versions import release
from tests.support.problems import Network
from tests.torch.optimizers import (
    CASES,
    UNTUNED,
    OwnRule,
    Run,
    assert_same,
    every,
    every_paired,
    everything,
    on,
    state_tensors,
    values,
    with_rule,
)

# torch's distributed checkpoint says that there is only one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def build(case, dtype, seed=0, decay=0.01):
    """Return a model with two groups of parameters, its optimizer and a schedule."""
    model = nn.ParameterList(Network(seed).parameters(dtype))  # a module: names for dcp
    first, *rest = model
    options = {"lr": 0.5, "weight_decay": decay} | ({"unit": "first"} if case.paired else {})
    opt = case([{"params": [first], "lr": 0.3}, {"params": rest}], **options)
    return model, opt, lr_scheduler.ExponentialLR(opt, 0.95)


# -- ways to save a model and its optimizer, and to load them into others ------------------------


def in_memory(model, opt, new_model, new_opt, tmp_path):
    new_model.load_state_dict(model.state_dict())
    new_opt.load_state_dict(opt.state_dict())


def in_inference_mode(*arguments):
    with torch.inference_mode():
        in_memory(*arguments)


def through_torch_save(model, opt, new_model, new_opt, tmp_path):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    new_model.load_state_dict(saved["model"])
    new_opt.load_state_dict(saved["opt"])


def through_dcp(model, opt, new_model, new_opt, tmp_path, *, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, opt, options=options)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=tmp_path / "dcp")
    weights, state = get_state_dict(new_model, new_opt, options=options)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=tmp_path / "dcp")
    set_state_dict(
        new_model, new_opt, model_state_dict=weights, optim_state_dict=state, options=options
    )


def through_flat_dcp(*arguments):
    if release("torch") < (2, 10):
        pytest.skip("torch flattens no nested state before 2.10")
    through_dcp(*arguments, flat=True)


# -- interruptions ------------------------------------------------------------------------------


def loaded(way, at_average=False, ready=False):
    """Continue in a new run. `at_average`: saved in eval mode; `ready`: so is the new one."""

    def interrupt(case, run, tmp_path):
        model, opt, schedule = run
        new = build(case, model[0].dtype, seed=9, decay=0.5)
        new[0][0].requires_grad_(model[0].requires_grad)
        if at_average:
            opt.eval()
        if ready:
            new[1].eval()
        saved = values(model)
        way(model, opt, *new[:2], tmp_path)
        new[2].load_state_dict(schedule.state_dict())
        for p in model:
            p.detach().fill_(7.0)  # no memory is shared
        opt.reset()
        if at_average:
            assert_same(values(new[0]), saved)
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
IN_PLACE = ("shared memory", "frozen")
AT_AVERAGE = {
    "torch.save": loaded(through_torch_save, at_average=True),
    "torch.save, ready": loaded(through_torch_save, at_average=True, ready=True),
    "dcp, ready": loaded(through_dcp, at_average=True, ready=True),
}


def trained(case, dtype, tmp_path, interrupt=None, cut=None):
    """Train with a first parameter that is frozen and unfrozen on the way."""
    problem, run = Network(samples=16), build(case, dtype)
    for i, xi in enumerate(problem.samples):

        def evaluate():
            on(run[1], lambda: problem.loss(list(run[0]), xi))()

        def freeze():
            run[0].requires_grad_(True)
            run[0][0].requires_grad_(not 5 <= i < 10)

        freeze()
        if i == cut:
            run = interrupt(case, run, tmp_path)
            freeze()
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
    if "dcp" in name and cut == 7 and not case.paired:
        pytest.skip("torch's checkpoint loads no state of a parameter that is frozen")
    assert_goes_on(case, dtype, tmp_path, INTERRUPTIONS[name], cut)


@every_paired
@pytest.mark.parametrize("name", [n for n in INTERRUPTIONS if n not in IN_PLACE])
def test_a_state_saved_between_the_halves_restarts_the_estimator(case, name, tmp_path):
    problem, (model, opt, schedule) = Network(samples=5), build(case, torch.float64)
    *samples, xi = problem.samples
    for sample in samples:
        opt.step(on(opt, lambda: problem.loss(list(model), sample)))
    on(opt, lambda: problem.loss(list(model), xi))()
    opt.move()
    sum_g_sq = opt.diagnostics()["sum_g_sq"]
    model, opt, _ = INTERRUPTIONS[name](case, (model, opt, schedule), tmp_path)
    assert not opt.started
    where = values(model)
    opt.step(on(opt, lambda: problem.loss(list(model), xi)))
    assert_same(values(model), where)
    assert opt.grad_evaluations == 8
    assert opt.diagnostics()["sum_g_sq"] > sum_g_sq


@pytest.mark.parametrize("name", AT_AVERAGE)
def test_a_run_that_is_saved_at_the_average_goes_on_bit_by_bit(name, tmp_path):
    assert_goes_on(UNTUNED, torch.bfloat16, tmp_path, AT_AVERAGE[name], 11)


def test_dcp_refuses_a_state_saved_at_the_average_unless_eval_was_called(tmp_path):
    with pytest.raises(ValueError, match=r"opt.eval\(\)"):
        trained(UNTUNED, torch.float64, tmp_path, loaded(through_dcp, at_average=True), 11)


@every
def test_reset_starts_over_from_the_present_point(case):
    run, fresh = Run(case, lr=0.5).train(0, 4), Run(case, lr=0.5)
    groups = run.opt.param_groups
    run.opt.reset()
    assert run.opt.param_groups is groups  # wrappers hold it
    fresh.copy_weights(run)
    assert_same(run.everything(), fresh.everything())
    assert_same(run.train(4).everything(), fresh.train(4).everything())


@every
@pytest.mark.parametrize("saved", [True, False], ids=["named", "bare"])
@pytest.mark.parametrize("own", [True, False], ids=["named", "bare"])
def test_a_state_loads_whether_or_not_its_parameters_have_names(case, saved, own):
    run, other = Run(case, named=saved).train(0, 3), Run(case, named=own)
    other.copy_weights(run)
    other.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))
    assert_same(run.train(3).everything(), other.train(3).everything())
    names = other.opt.param_groups[0].get("param_names")
    assert names == (["a", "b", "c"] if saved or own else None) or release("torch") < (2, 6)


@every
def test_dcp_loads_with_more_layers_frozen(case, tmp_path):
    """Layers are frozen from the first on, and torch's checkpoint leaves out what is frozen."""
    run, new = Run(case, samples=8).train(0, 5), Run(case, samples=8)
    new.params[0].requires_grad_(False)
    models = nn.ParameterList(run.params), nn.ParameterList(new.params)
    through_dcp(models[0], run.opt, models[1], new.opt, tmp_path)
    assert new.opt.grad_evaluations == run.opt.grad_evaluations
    run.params[0].requires_grad_(False)
    assert_same(values(run.train(5).params), values(new.train(5).params))
    new.params[0].requires_grad_(True)  # starts now
    held = values(new.params)
    assert all(bool((p != q).any()) for p, q in zip(new.train().params, held))


@every
def test_user_hooks_see_the_whole_state_and_have_the_last_word(case):
    run, twin, name = Run(case).train(), Run(case), case.buffers[0]
    p, q = twin.params[:2]

    def doubled(_, saved):
        assert numbers(saved)["grad_evaluations"] == run.opt.grad_evaluations
        saved["state"][0][name] = 2 * saved["state"][0][name]
        return saved

    def sevens(loaded):
        loaded.state[q][name] = torch.full_like(q, 7.0)

    run.opt.register_state_dict_post_hook(doubled)
    twin.opt.register_load_state_dict_pre_hook(doubled)
    twin.opt.register_load_state_dict_post_hook(sevens)
    twin.opt.load_state_dict(run.opt.state_dict())
    assert torch.equal(twin.opt.state[p][name], 4 * run.opt.state[run.params[0]][name])
    assert (twin.opt.state[q][name] == 7).all()


# -- states that are refused ---------------------------------------------------------------------


def numbers(saved):
    return next(entry["scalars"] for entry in saved["state"].values() if "scalars" in entry)


def state_of(case, tmp_path, change=lambda saved: None):
    saved = Run(case, samples=3).train().opt.state_dict()
    change(saved)
    return saved


def state_of_adam(case, tmp_path):
    run = Run(torch.optim.Adam)
    run.opt.step(run.closure(0))
    return run.opt.state_dict()


def state_of_another_optimizer(case, tmp_path):
    return state_of(next(other for other in CASES if other.cls is not case.cls), tmp_path)


def state_loaded_in_part(case, tmp_path):
    """dcp silently drops numbers under integer keys, which opt.state_dict() has."""
    dcp.save({"opt": state_of(case, tmp_path)}, checkpoint_id=tmp_path / "dcp")
    loaded = {"opt": Run(case).opt.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    return loaded["opt"]


def state_of_shapes(*shapes):
    def make(case, tmp_path):
        return case([nn.Parameter(torch.ones(shape)) for shape in shapes]).state_dict()

    return make


REFUSED = {
    "Adam": (state_of_adam, "exp_avg"),
    "weights": (lambda case, tmp_path: {"weights": 1}, "weights"),
    "newer": (partial(state_of, change=lambda saved: numbers(saved).update(format=99)), "99"),
    "option": (
        partial(state_of, change=lambda saved: saved["param_groups"][0].pop("maximize")),
        "maximize",
    ),
    "in part": (state_loaded_in_part, r"get_state_dict\(model, opt\)"),
    "rule": (state_of_another_optimizer, "rule="),
    "shapes": (state_of_shapes(20, 5, 15), r"\(20,\).*\(5, 4\)"),
    "count": (state_of_shapes((5, 4)), "loaded state dict"),
}


@every
@pytest.mark.parametrize("name", REFUSED)
def test_other_states_are_refused_and_nothing_is_lost(case, name, tmp_path):
    run, (make, message) = Run(case).train(0, 5), REFUSED[name]
    before, diagnostics = run.everything(), run.opt.diagnostics()
    with pytest.raises(ValueError, match=message):
        run.opt.load_state_dict(make(case, tmp_path))
    assert_same(run.everything(), before)
    assert run.opt.diagnostics() == diagnostics


OTHER_OPTIONS = {  # the option first: what saves, its options, and those of another optimizer
    "unit": (StormPlus, {"unit": "first"}, {"unit": 2.0}),
    "unit of a rule": (with_rule, {"rule": OwnRule()}, {"rule": OwnRule(unit=0.3)}),
    "theta": (Storm, {"theta": 0.25}, {}),
    "state_dtype": (Untuned, {"state_dtype": torch.bfloat16}, {}),
    "state_dtype of None": (Untuned, {}, {"state_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_a_state_is_bound_to_the_options_of_its_optimizer_and_its_copies(name):
    params, (make, options, others) = [nn.Parameter(torch.ones(2))], OTHER_OPTIONS[name]
    opt, option = make(params, **options), name.split()[0]
    copy.deepcopy(opt).load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match=f" {option}=.* {option}="):
        make(params, **others).load_state_dict(opt.state_dict())


@pytest.mark.parametrize("cls", [StormPlus, Untuned])
def test_a_pickled_state_does_not_grow_with_the_square_of_the_tensors(cls):
    def size(tensors):
        return len(
            pickle.dumps(cls([nn.Parameter(torch.ones(1)) for _ in range(tensors)]).state_dict())
        )

    assert size(80) < 5 * size(20)
