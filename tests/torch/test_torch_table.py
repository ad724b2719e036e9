"""torch's own table of optimizers, with rows for ours.

`torch.testing` ships the table that torch's optimizer tests run over, not the tests. The tests here
bear the names of torch's, so that a difference can be looked up, and some of torch's rows run too:
what they fail is not torch's contract. What test_contract.py covers is not repeated.
`DIFFERENCES` lists by name what ours do otherwise on purpose.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import stormplus

pytestmark = pytest.mark.long

PAIRED = ("StormPlus", "SimplifiedStormPlus", "Storm")
OURS = (*PAIRED, "Untuned")
THEIRS = ("Adam", "LBFGS", "RMSprop", "SGD")

DIFFERENCES = {  # test: which optimizers, and why; docs/deviations.md has them for users
    "test_step_is_noop_when_params_have_no_grad": (PAIRED, "no gradient is an error"),
    "test_can_load_older_state_dict": (OURS, "a group without an option is refused"),
    "test_fused_does_not_step_if_foundinf": (PAIRED, "scaled_step is in its place"),
    "test_differentiable": (OURS, "a step cannot be differentiated"),
    "test_capturable": (OURS, "no CUDA graph over a whole step"),
}

COMMON = ({}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "maximize": True})
OF_PAIRED = (
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"lr": 0.01},
    {"lr": torch.tensor(0.001)},
    {"unit": "first", "lr": 0.1},
)


def row(torchs, name):
    """One of torch's rows, or a row of torch's kind for one of ours."""
    if name in THEIRS:
        return next(info for info in torchs.optim_db if info.name == name)
    paired = name in PAIRED

    def inputs(device, dtype=None):
        options = (*COMMON, *(OF_PAIRED if paired else ()))
        return [torchs.OptimizerInput(None, copy.deepcopy(o), str(o)) for o in options]

    def errors(device, dtype):
        found = torchs.get_error_inputs_for_all_optims(device, dtype)
        return found if paired else [e for e in found if "lr" not in repr(e.optimizer_error_input)]

    return torchs.OptimizerInfo(
        getattr(stormplus, name),
        optim_inputs_func=inputs,
        optim_error_inputs_func=errors,
        supported_impls=("foreach",) if paired else (),
        step_requires_closure=paired,
    )


@pytest.fixture(scope="session")
def torchs():
    pytest.importorskip("expecttest", reason="torch.testing needs it: pip install expecttest")
    from torch.testing._internal import common_optimizers

    return common_optimizers


@pytest.fixture(params=[*OURS, *THEIRS])
def info(request, torchs):
    names, why = DIFFERENCES.get(request.node.originalname, ((), ""))
    if request.param in names:
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    return row(torchs, request.param)


def inputs_of(info):
    """The options of a row, with those of passing over memory, on the CPU."""
    found = [given.kwargs for given in info.optim_inputs_func(device="cpu")]
    if "foreach" in info.supported_impls:
        found += [kwargs | {"foreach": way} for kwargs in found for way in (False, True)]
    return [kwargs for kwargs in found if not kwargs.get("capturable")]  # those ask for a GPU


class Problem:
    """Least squares: a layer of 5 x 4, one batch."""

    def __init__(self, *, contiguous=True):
        make = torch.Generator().manual_seed(3)
        weight = torch.randn(5, 4, generator=make)
        if not contiguous:
            weight = torch.stack([weight, weight], dim=-1)[..., 0]
        self.params = [nn.Parameter(weight), nn.Parameter(torch.randn(5, generator=make))]
        self.rows = torch.randn(12, 4, generator=make)
        self.targets = torch.randn(12, 5, generator=make)

    def loss(self):
        weight, bias = self.params
        return (self.rows @ weight.T + bias - self.targets).square().mean()

    def closure(self, opt):
        def closure():
            opt.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return closure

    def run(self, info, opt, steps):
        for _ in range(steps):
            closure = self.closure(opt)
            if info.step_requires_closure:
                opt.step(closure)
            else:
                closure()
                opt.step()
        return [p.detach().clone() for p in self.params]


def test_errors(info, torchs):
    for wrong in info.optim_error_inputs_func("cpu", torch.float32):
        asked = wrong.optimizer_error_input
        params = Problem().params if asked.params is None else asked.params
        assert wrong.error_on is torchs.OptimizerErrorEnum.CONSTRUCTION_ERROR
        expects = pytest.warns if issubclass(wrong.error_type, Warning) else pytest.raises
        with expects(wrong.error_type, match=wrong.error_regex):
            info.optim_cls(params, **asked.kwargs)


@pytest.mark.parametrize("contiguous", [True, False])
def test_forloop_goes_right_direction(info, contiguous):
    if info.name == "LBFGS" and not contiguous:
        return  # seconds, and nothing new
    for kwargs in inputs_of(info):
        problem = Problem(contiguous=contiguous)
        first = problem.loss().item()
        problem.run(info, info.optim_cls(problem.params, **kwargs), 20)
        last = problem.loss().item()
        assert last > first if kwargs.get("maximize") else last < first, kwargs


def test_set_default_dtype_works_with_foreach(info):
    for kwargs in inputs_of(info) if "foreach" in info.supported_impls else ():
        problem = Problem()
        try:
            torch.set_default_dtype(torch.float64)
            problem.run(info, info.optim_cls(problem.params, **kwargs), 3)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.isfinite(p).all() for p in problem.params)


def test_fused_does_not_step_if_foundinf(info):
    """`GradScaler` says that it has found an overflow, and the optimizer does nothing."""
    if "cpu" not in info.supports_fused_on and info.name not in OURS:
        return
    problem = Problem()
    opt = info.optim_cls(problem.params, **({"fused": True} if info.name in THEIRS else {}))
    start = [p.detach().clone() for p in problem.params]
    for p in problem.params:
        p.grad = torch.ones_like(p)
    opt.found_inf, opt.grad_scale = torch.ones(()), None
    opt.step()
    assert all(map(torch.equal, problem.params, start))


def test_differentiable(info):
    if "differentiable" in info.supported_impls or info.name in OURS:
        info.optim_cls(Problem().params, differentiable=True)


def test_capturable(info):
    if info.has_capturable_arg or info.name in OURS:
        info.optim_cls(Problem().params, capturable=True)


def test_step_is_noop_when_params_have_no_grad(info):
    for kwargs in inputs_of(info):
        problem = Problem()
        start = [p.detach().clone() for p in problem.params]
        opt = info.optim_cls(problem.params, **kwargs)
        opt.step(lambda: torch.zeros(()))
        assert all(map(torch.equal, problem.params, start))


def test_second_order_optims_return_consistent_types(info):
    """The closure's loss, as the closure returned it."""
    for returned in (torch.tensor(2.5), 2.5):
        problem = Problem()
        opt = info.optim_cls(problem.params)
        evaluate = problem.closure(opt)
        for _ in range(2):
            assert type(opt.step(lambda: (evaluate(), returned)[1])) is type(returned)


def test_can_load_older_state_dict(info):
    """Options that came after the first version may be missing in a saved group."""
    flags = {"foreach", "fused", "maximize", "differentiable", "capturable"}
    problem = Problem()
    opt = info.optim_cls(problem.params)
    problem.run(info, opt, 2)
    old = opt.state_dict()
    old["param_groups"] = [
        {k: v for k, v in group.items() if k not in flags} for group in old["param_groups"]
    ]
    opt.load_state_dict(old)
    problem.run(info, opt, 2)


def test_can_load_from_to_named_state_dict(info):
    names = ["layer.weight", "layer.bias"]
    for saved_names, own_names in ((names, None), (None, names), (names, ["a", "b"])):
        problem = Problem()
        opt = info.optim_cls(
            list(zip(saved_names, problem.params)) if saved_names else problem.params
        )
        problem.run(info, opt, 3)
        twin = copy.deepcopy(problem)
        other = info.optim_cls(list(zip(own_names, twin.params)) if own_names else twin.params)
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert all(map(torch.equal, problem.run(info, opt, 3), twin.run(info, other, 3)))
        assert other.param_groups[0]["param_names"] == (saved_names or own_names)  # as torch


def test_step_pre_hook(info):
    """A hook before a step may change its arguments; one after it sees what was passed."""
    problem, seen = Problem(), []
    opt = info.optim_cls(problem.params)
    closure = problem.closure(opt)
    closure()
    opt.register_step_pre_hook(lambda opt, args, kwargs: ((opt, closure), {}))
    opt.register_step_post_hook(lambda opt, args, kwargs: seen.append((args, kwargs)))
    assert opt.step(None) is not None
    assert seen == [((opt, closure), {})]


def test_state_dict_pre_hook(info):
    problem = Problem()
    opt = info.optim_cls(problem.params)
    handle = opt.register_state_dict_pre_hook(lambda opt: opt.state.update(test=1))
    assert opt.state_dict()["state"]["test"] == 1
    handle.remove()
    problem.run(info, opt, 2)  # what is no dictionary does no harm
    opt.state_dict()


def test_state_dict_post_hook(info):
    opt = info.optim_cls(Problem().params)
    handle = opt.register_state_dict_post_hook(lambda opt, saved: saved | {"more": 1})
    assert opt.state_dict()["more"] == 1
    handle.remove()
    assert "more" not in opt.state_dict()


def test_load_state_dict_pre_post_hook(info):
    problem, order = Problem(), []
    opt = info.optim_cls(problem.params)
    problem.run(info, opt, 2)
    options = {"weight_decay": 0.25} if info.name == "Untuned" else {"lr": 0.25}

    def change(opt, state_dict):
        order.append("before")
        groups = [group | options for group in state_dict["param_groups"]]
        return state_dict | {"param_groups": groups}

    opt.register_load_state_dict_pre_hook(lambda opt, _: order.append("second"))
    opt.register_load_state_dict_pre_hook(change, prepend=True)
    opt.register_load_state_dict_post_hook(lambda opt: order.append("after"))
    opt.load_state_dict(opt.state_dict())
    assert order == ["before", "second", "after"]
    assert options.items() <= opt.param_groups[0].items()


def test_the_page_lists_the_differences():
    page = Path(__file__).parents[2].joinpath("docs/deviations.md").read_text()
    listed = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `test_")}
    assert listed >= DIFFERENCES.keys()
