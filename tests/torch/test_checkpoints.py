"""A resumed run is the run: bit by bit, in every precision, also between the halves."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ways import through_dcp, through_torch_save
from problems_for_tests import Network
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from stormplus import SimplifiedStormPlus, Storm, StormPlus, UniformIterate, scaled_step

CLASSES = [StormPlus, SimplifiedStormPlus, Storm]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Model(nn.Module):
    """The test network as a module, so that a checkpoint has names."""

    def __init__(self, problem, dtype):
        super().__init__()
        self.problem = problem
        self.weights = nn.ParameterList(problem.parameters(dtype))

    def loss(self, xi):
        return self.problem.loss(list(self.weights), xi)


def evaluate(model, opt, xi):
    opt.zero_grad()
    model.loss(xi).backward()


def run(model, opt, samples, stop_in_pair=False):
    for i, xi in enumerate(samples):
        if opt.pending:  # resumed: the first half is done
            evaluate(model, opt, xi)
            opt.estimate()
            continue
        if opt.started:
            evaluate(model, opt, xi)
            opt.move()
            if stop_in_pair and i == len(samples) - 1:
                return
        evaluate(model, opt, xi)
        opt.estimate()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", [through_torch_save, through_dcp])
@pytest.mark.parametrize("in_pair", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", CLASSES)
def test_twins(cls, dtype, in_pair, way, tmp_path):
    problem = Network(samples=20)
    model, whole = Model(problem, dtype), Model(problem, dtype)
    opt = cls(model.parameters(), lr=0.5, weight_decay=0.01)
    reference = cls(whole.parameters(), lr=0.5, weight_decay=0.01)
    run(whole, reference, problem.samples)

    run(model, opt, problem.samples[:8], stop_in_pair=in_pair)
    resumed = Model(Network(seed=9), dtype)
    new_opt = cls(resumed.parameters(), lr=0.1)
    way(model, opt, resumed, new_opt, tmp_path)
    assert new_opt.pending == in_pair
    run(resumed, new_opt, problem.samples[7 if in_pair else 8 :])

    for a, b in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(a, b)
        d = new_opt.state[b]["estimator"]
        assert torch.equal(reference.state[a]["estimator"], d)
        assert d.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert reference.diagnostics() == new_opt.diagnostics()


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_every_scope_and_groups_of_their_own(scope, tmp_path):
    problem = Network(samples=20)

    def made():
        model = Model(problem, torch.float32)
        groups = [{"params": [model.weights[0]], "lr": 0.3}, {"params": list(model.weights[1:])}]
        return model, StormPlus(groups, lr=0.5, scope=scope, norm="mean")

    (whole, reference), (model, opt), (resumed, new_opt) = made(), made(), made()
    run(whole, reference, problem.samples)
    run(model, opt, problem.samples[:8])
    through_torch_save(model, opt, resumed, new_opt, tmp_path)
    run(resumed, new_opt, problem.samples[8:])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", [through_torch_save, through_dcp])
def test_frozen_first_parameter_survives(way, tmp_path):
    problem = Network(samples=10)

    def made():
        model = Model(problem, torch.float32)
        model.weights[0].requires_grad_(False)
        return model, StormPlus(model.parameters())

    (whole, reference), (model, opt), (resumed, new_opt) = made(), made(), made()
    run(whole, reference, problem.samples)
    run(model, opt, problem.samples[:5])
    way(model, opt, resumed, new_opt, tmp_path)
    run(resumed, new_opt, problem.samples[5:])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", [through_torch_save, through_dcp])
def test_freezing_the_parameter_that_keeps_the_numbers(way, tmp_path):
    problem = Network(samples=12)
    runs = []
    for save in (False, True):
        model = Model(problem, torch.float64)
        opt = StormPlus(model.parameters())
        run(model, opt, problem.samples[:4])
        sums = opt.diagnostics()
        model.weights[0].requires_grad_(False)
        if save:
            resumed = Model(problem, torch.float64)
            resumed.weights[0].requires_grad_(False)
            new_opt = StormPlus(resumed.parameters())
            way(model, opt, resumed, new_opt, tmp_path)
            model, opt = resumed, new_opt
        assert opt.diagnostics() == sums
        run(model, opt, problem.samples[4:8])
        model.weights[0].requires_grad_(True)
        run(model, opt, problem.samples[8:])
        assert opt.diagnostics()["step"] == 12
        runs.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_scheduler_comes_along():
    problem = Network(samples=20)
    runs = []
    for cut in (20, 8):
        params = problem.parameters()
        opt = StormPlus(params)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
        for xi in problem.samples[:cut]:
            opt.step(problem.closure(opt, params, xi))
            schedule.step()
        saved = {"opt": opt.state_dict(), "schedule": schedule.state_dict()}
        new_params = [nn.Parameter(p.detach().clone()) for p in params]
        new_opt = StormPlus(new_params)
        new_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(new_opt, 20)
        new_opt.load_state_dict(saved["opt"])
        new_schedule.load_state_dict(saved["schedule"])
        for xi in problem.samples[cut:]:
            new_opt.step(problem.closure(new_opt, new_params, xi))
            new_schedule.step()
        runs.append(new_params)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_all_parts_of_a_run_through_dcp(tmp_path):
    def parts(samples):
        problem = Network(samples=8)
        model = Model(problem, torch.float32)
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
                loss = model.loss(xi)
                made["scaler"].scale(loss).backward()
                return loss

            scaled_step(opt, made["scaler"], closure)
            made["schedule"].step()
            made["iterate"].update()
        return made

    others = ("schedule", "scaler", "iterate")

    def states(made):
        weights, state = get_state_dict(made["model"], made["opt"])
        rest = {name: made[name].state_dict() for name in others}
        return {"model": weights, "opt": state} | rest

    trained, fresh = parts(6), parts(0)
    dcp.save(states(trained), checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = states(fresh)
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(
        fresh["model"],
        fresh["opt"],
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["opt"],
    )
    for name in others:
        fresh[name].load_state_dict(loaded[name])
    assert fresh["opt"].diagnostics() == trained["opt"].diagnostics()
    assert fresh["scaler"].get_scale() == trained["scaler"].get_scale() > 4.0
    assert fresh["schedule"].get_last_lr() == trained["schedule"].get_last_lr()
    assert fresh["iterate"].chosen == trained["iterate"].chosen
    for a, b in zip(fresh["iterate"].state_dict()["kept"], trained["iterate"].state_dict()["kept"]):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_state_that_dcp_loads_in_part_is_refused(tmp_path):
    # dcp drops numbers under integer keys, which opt.state_dict() has: without a word of its own
    params, opt = trained()
    dcp.save({"opt": opt.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    fresh = StormPlus(Network().parameters())
    loaded = {"opt": fresh.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ValueError, match=r"loaded in part.*get_state_dict\(model, opt\)"):
        fresh.load_state_dict(loaded["opt"])


def test_loading_does_not_share_memory():
    problem = Network(samples=4)
    params = problem.parameters()
    opt = StormPlus(params)
    problem.run(opt, params)
    state = opt.state_dict()
    kept = state["state"][0]["estimator"].clone()
    twin = StormPlus(problem.parameters())
    twin.load_state_dict(state)
    twin.restart()
    twin.step(problem.closure(twin, twin.param_groups[0]["params"], problem.samples[0]))
    assert torch.equal(state["state"][0]["estimator"], kept)


def test_user_hooks_see_and_change_what_is_loaded():
    problem = Network(samples=4)
    params = problem.parameters()
    opt = StormPlus(params)
    problem.run(opt, params)
    twin = StormPlus(problem.parameters())

    def doubled(_, state_dict):
        state_dict["state"][0]["estimator"] = 2 * state_dict["state"][0]["estimator"]
        return state_dict

    twin.register_load_state_dict_pre_hook(doubled)
    before = opt.state[params[0]]["estimator"].clone()
    twin.load_state_dict(opt.state_dict())
    first = twin.param_groups[0]["params"][0]
    assert torch.equal(twin.state[first]["estimator"], 2 * before)


def test_user_hooks_after_loading_have_the_last_word():
    problem = Network(samples=4)
    params = problem.parameters()
    opt = StormPlus(params)
    problem.run(opt, params)
    twin = StormPlus(problem.parameters())
    first = twin.param_groups[0]["params"][0]

    def mine(loaded):
        loaded.state[first]["estimator"] = torch.full_like(first, 7.0)

    twin.register_load_state_dict_post_hook(mine)
    twin.load_state_dict(opt.state_dict())
    assert (twin.state[first]["estimator"] == 7).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("step_after", [False, True])
def test_dcp_after_freezing_and_unfreezing(which, step_after, tmp_path):
    problem = Network(samples=12)
    model = Model(problem, torch.float64)
    opt = StormPlus(model.parameters())
    run(model, opt, problem.samples[:3])
    model.weights[which].requires_grad_(False)
    run(model, opt, problem.samples[3:5])
    model.weights[which].requires_grad_(True)
    if step_after:
        run(model, opt, problem.samples[5:7])
    resumed = Model(problem, torch.float64)
    new_opt = StormPlus(resumed.parameters())
    through_dcp(model, opt, resumed, new_opt, tmp_path)
    for net, optimizer in ((model, opt), (resumed, new_opt)):
        run(net, optimizer, problem.samples[7:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters()))


def test_constants_and_bounds_come_along_or_are_refused():
    problem = Network(samples=3)
    params = problem.parameters()
    opt = Storm(params, theta=0.5, max_move=0.01)
    problem.run(opt, params)
    with pytest.raises(ValueError, match=r"saved with theta=0.5, Storm has theta=0.1"):
        Storm(problem.parameters()).load_state_dict(opt.state_dict())
    twin = Storm(problem.parameters(), theta=0.5)
    twin.load_state_dict(opt.state_dict())
    assert twin.param_groups[0]["max_move"] == 0.01


def test_state_of_another_model_is_refused():
    problem = Network(samples=3)
    params = problem.parameters()
    opt = StormPlus(params)
    problem.run(opt, params)
    other = StormPlus([nn.Parameter(torch.ones(p.numel())) for p in params])
    with pytest.raises(ValueError, match=r"has the shape \(5, 4\), the parameter \(20,\)"):
        other.load_state_dict(opt.state_dict())


def trained(cls=StormPlus, **options):
    problem = Network(samples=3)
    params = problem.parameters()
    opt = cls(params, **options)
    problem.run(opt, params)
    return params, opt


def adam_state():
    params = Network().parameters()
    opt = torch.optim.Adam(params)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    return opt.state_dict()


def newer():
    state = trained()[1].state_dict()
    state["state"][0]["format"] = 99
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (adam_state, "not the state of StormPlus .*exp_avg"),
        (
            lambda: torch.optim.SGD(Network().parameters()).state_dict(),
            "not the state of StormPlus",
        ),
        (lambda: {"weights": 1}, r"not an optimizer state: it has the keys \['weights'\]"),
        (newer, "format 99, this version of stormplus reads 1"),
        (lambda: trained(Storm)[1].state_dict(), "rule 'StormRule', StormPlus has 'StormPlusRule'"),
        (lambda: trained(norm="mean")[1].state_dict(), "norm 'mean', StormPlus has 'raw'"),
        (lambda: trained(scope="tensor")[1].state_dict(), "scope 'tensor', StormPlus has 'global'"),
    ],
)
def test_other_states_are_refused_and_nothing_is_lost(state, message):
    params, opt = trained()
    estimator, numbers = opt.state[params[0]]["estimator"].clone(), opt.diagnostics()
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(state())
    assert torch.equal(opt.state[params[0]]["estimator"], estimator)
    assert opt.diagnostics() == numbers


def test_state_is_one_buffer_and_scalars():
    params = [nn.Parameter(torch.randn(1000, 1000)), nn.Parameter(torch.randn(1000))]
    opt = StormPlus(params)
    size = sum(p.numel() * p.element_size() for p in params)
    tensors = [v for state in opt.state.values() for v in state.values() if torch.is_tensor(v)]
    assert sum(t.numel() * t.element_size() for t in tensors) <= 1.01 * size
