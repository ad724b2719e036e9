"""torch's own table of optimizers, with rows for ours.

`torch.testing` ships the table that torch's optimizer tests run over, not the tests. The tests here
are written from what the table says that an optimizer does, and bear the names of torch's, so that
a difference can be looked up. Some of torch's rows run beside ours: what they fail is not torch's
contract. `DIFFERENCES` lists what ours do otherwise, and docs/deviations.md says so too.
"""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import stormplus

pytestmark = pytest.mark.long

PAIRED = ("StormPlus", "SimplifiedStormPlus", "Storm")
OURS = (*PAIRED, "Untuned")
THEIRS = ("Adam", "LBFGS", "RMSprop", "SGD")

DIFFERENCES = {  # test: who, and why; docs/deviations.md has them for users
    "test_step_is_noop_when_params_have_no_grad": (PAIRED, "no gradient is an error"),
    "test_can_load_older_state_dict": (OURS, "a group without an option is refused"),
    "test_fused_does_not_step_if_foundinf": (PAIRED, "scaled_step is in its place"),
    "test_differentiable": (OURS, "a step cannot be differentiated"),
    "test_capturable": (OURS, "no CUDA graph over a whole step"),
}

# Options beside the ways of passing over memory; `Untuned` has no lr.
COMMON = (
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
)
OF_PAIRED = (
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"lr": 0.01},
    {"lr": torch.tensor(0.001)},
    {"norm": "mean"},
    {"scope": "tensor"},
    {"max_move": 0.1},
)


def row(torchs, name):
    """One of torch's rows, or a row of torch's kind for one of ours."""
    if name in THEIRS:
        return next(info for info in torchs.optim_db if info.name == name)
    paired = name in PAIRED
    options = (*COMMON, *(OF_PAIRED if paired else ()))

    def inputs(device, dtype=None):
        return [torchs.OptimizerInput(None, copy.deepcopy(o), str(o)) for o in options]

    def errors(device, dtype):
        found = torchs.get_error_inputs_for_all_optims(device, dtype)
        return found if paired else [e for e in found if "lr" not in repr(e.optimizer_error_input)]

    return torchs.OptimizerInfo(
        getattr(stormplus, name),
        optim_inputs_func=inputs,
        optim_error_inputs_func=errors,
        supported_impls=("foreach", "fused") if paired else (),
        supports_fused_on=("cpu",) if paired else (),
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


@pytest.fixture(autouse=True)
def as_written(uncompiled):
    """The fused kernels as they are written; test_kernels.py compiles them."""


def inputs_of(info, *, ways=True):
    """The options of a row; with those of passing over memory, on the CPU too."""
    found = [given.kwargs for given in info.optim_inputs_func(device="cpu")]
    if ways and "foreach" in info.supported_impls:
        found += [kwargs | {"foreach": way} for kwargs in found for way in (False, True)]
        # torch's own fused kernels take fewer dtypes than the table's tests ask for
        fused = "cpu" in info.supports_fused_on and info.name in OURS
        found += [k | {"fused": True} for k in found if fused and "foreach" not in k]
    # Half of RMSprop's and Adam's options ask for a GPU.
    return [kwargs for kwargs in found if not kwargs.get("capturable")]


class Problem:
    """Least squares: a layer of 5 x 4, one batch."""

    def __init__(self, dtype=torch.float32, *, contiguous=True):
        make = torch.Generator().manual_seed(3)
        weight = torch.randn(5, 4, generator=make, dtype=dtype)
        if not contiguous:
            weight = torch.stack([weight, weight], dim=-1)[..., 0]
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.randn(5, generator=make, dtype=dtype))
        self.rows = torch.randn(12, 4, generator=make, dtype=dtype)
        self.targets = torch.randn(12, 5, generator=make, dtype=dtype)

    @property
    def params(self):
        return [self.weight, self.bias]

    def loss(self):
        errors = self.rows @ self.weight.T + self.bias - self.targets
        return (errors * errors.conj()).real.mean()

    def step(self, info, opt):
        def closure():
            opt.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        if info.step_requires_closure:
            return opt.step(closure)
        loss = closure()
        opt.step()
        return loss

    def run(self, info, opt, steps):
        for _ in range(steps):
            self.step(info, opt)
        return [p.detach().clone() for p in self.params]


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def given(info, opt, params, grads):
    """A step with given gradients."""

    def closure():
        for p, g in zip(params, grads):
            p.grad = None if g is None else g.clone()
        return torch.zeros(())

    if info.step_requires_closure:
        opt.step(closure)
    else:
        closure()
        opt.step()


# -- what is refused -----------------------------------------------------------------------------


def test_errors(info, torchs):
    for wrong in info.optim_error_inputs_func("cpu", torch.float32):
        asked = wrong.optimizer_error_input
        params = Problem().params if asked.params is None else asked.params
        assert wrong.error_on is torchs.OptimizerErrorEnum.CONSTRUCTION_ERROR
        expects = pytest.warns if issubclass(wrong.error_type, Warning) else pytest.raises
        with expects(wrong.error_type, match=wrong.error_regex):
            info.optim_cls(params, **asked.kwargs)


def test_optim_infos_do_not_specify_global_cliquey_kwargs(info):
    for kwargs in inputs_of(info, ways=False):
        assert not kwargs.keys() & {"foreach", "fused", "differentiable"}


# -- where it goes -------------------------------------------------------------------------------


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("schedule", [None, "step", "plateau"])
def test_forloop_goes_right_direction(info, contiguous, schedule):
    if info.name == "LBFGS" and not contiguous:
        return  # seconds, and nothing new
    for kwargs in inputs_of(info, ways=schedule is None):
        problem = Problem(contiguous=contiguous)
        opt = info.optim_cls(problem.params, **kwargs)
        scheduler = {
            None: lambda: None,
            "step": lambda: lr_scheduler.StepLR(opt, gamma=0.9, step_size=10),
            "plateau": lambda: lr_scheduler.ReduceLROnPlateau(opt),
        }[schedule]()
        first = problem.loss().item()
        for _ in range(20):
            loss = problem.step(info, opt)
            if schedule == "step":
                scheduler.step()
            elif schedule == "plateau":
                scheduler.step(loss.detach())
        last = problem.loss().item()
        assert last > first if kwargs.get("maximize") else last < first, kwargs


def test_param_groups_lr(info):
    if info.name in ("LBFGS", "Untuned"):  # no groups; no lr
        return
    for kwargs in inputs_of(info):
        problem = Problem()
        still = nn.Parameter(problem.weight.detach().clone())
        groups = [{"params": problem.params}, {"params": [still], "lr": 0.0}]
        opt = info.optim_cls(groups, **kwargs | {"lr": 1e-3})
        assert [group["lr"] for group in opt.param_groups] == [1e-3, 0.0]
        start, first = still.detach().clone(), problem.loss().item()
        whole = problem.loss
        problem.loss = lambda: whole() + still.square().sum() / 100
        problem.run(info, opt, 5)
        assert torch.equal(still, start), kwargs
        assert (whole().item() > first) == bool(kwargs.get("maximize")), kwargs


def test_param_groups_weight_decay(info):
    if info.name == "LBFGS":
        return
    problem = Problem()
    groups = [{"params": [problem.weight], "weight_decay": 0.5}, {"params": [problem.bias]}]
    opt = info.optim_cls(groups)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.5, 0.0]
    other = Problem()
    other_opt = info.optim_cls([{"params": [other.weight]}, {"params": [other.bias]}])
    first = problem.loss().item()
    problem.run(info, opt, 20)
    other.run(info, other_opt, 20)
    assert problem.loss() < first
    assert problem.weight.norm() < other.weight.norm()


def test_param_group_with_lrscheduler_goes_right_direction(info):
    if info.name == "LBFGS":
        return
    problem = Problem()
    opt = info.optim_cls([{"params": [problem.weight]}, {"params": [problem.bias]}])
    schedulers = [
        lr_scheduler.StepLR(opt, gamma=0.9, step_size=10),
        lr_scheduler.ReduceLROnPlateau(opt),
    ]
    first = problem.loss().item()
    for _ in range(20):
        loss = problem.step(info, opt)
        schedulers[0].step()
        schedulers[1].step(loss.detach())
    assert problem.loss() < first
    assert len({group["lr"] for group in opt.param_groups}) == 1
    assert opt.param_groups[0]["lr"] < opt.param_groups[0]["initial_lr"]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr(info, shape):
    if info.name in ("Untuned", "LBFGS"):  # no lr; a line search, where a rounding decides
        return
    for kwargs in inputs_of(info):
        if isinstance(kwargs.get("lr"), torch.Tensor) or kwargs.get("foreach"):  # as torch asks
            continue
        ends = []
        for lr in (0.125, torch.full(shape, 0.125)):
            problem = Problem()
            opt = info.optim_cls(problem.params, **kwargs | {"lr": lr})
            schedule = lr_scheduler.StepLR(opt, gamma=0.5, step_size=2)
            for _ in range(5):
                problem.step(info, opt)
                schedule.step()
            ends.append(problem.params)
            assert isinstance(opt.param_groups[0]["lr"], type(lr))
        torch.testing.assert_close(*ends)


def test_complex(info):
    """A complex parameter is two real ones."""
    for kwargs in inputs_of(info):
        problem, twin = Problem(torch.complex64), Problem(torch.complex64)
        reals = [nn.Parameter(torch.view_as_real(p.detach()).clone()) for p in twin.params]

        def loss():
            weight, bias = map(torch.view_as_complex, reals)
            errors = twin.rows @ weight.T + bias - twin.targets
            return (errors * errors.conj()).real.mean()

        twin.loss = loss
        problem.run(info, info.optim_cls(problem.params, **kwargs), 5)
        twin.run(info, info.optim_cls(reals, **copy.deepcopy(kwargs)), 5)
        torch.testing.assert_close([torch.view_as_real(p.detach()) for p in problem.params],
                                   [p.detach() for p in reals], rtol=1e-4, atol=1e-5)  # fmt: skip


# -- ways of passing over memory -----------------------------------------------------------------


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_foreach_and_fused_match_forloop(info, way):
    if way not in info.supported_impls or (way == "fused" and "cpu" not in info.supports_fused_on):
        return
    for kwargs in inputs_of(info, ways=False):
        ends = []
        for chosen in (False, True):
            problem = Problem(torch.float64)
            opt = info.optim_cls(problem.params, **copy.deepcopy(kwargs), **{way: chosen})
            ends.append((problem.run(info, opt, 7), opt.state_dict()["state"]))
        torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_set_default_dtype_works_with_foreach(info):
    if "foreach" not in info.supported_impls:
        return
    for kwargs in inputs_of(info):
        try:
            torch.set_default_dtype(torch.float64)
            problem = Problem(torch.float32)
            problem.run(info, info.optim_cls(problem.params, **kwargs), 3)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.isfinite(p).all() for p in problem.params)


def test_mixed_device_dtype(info):
    """Each parameter moves by its own gradient, in its own precision."""
    for kwargs in inputs_of(info):
        if info.name == "LBFGS" or "lr" in kwargs:
            continue  # one flat vector; steps below float16's last digit
        dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        params = [nn.Parameter(torch.full((3, 4), 2.0, dtype=dtype)) for dtype in dtypes]
        opt = info.optim_cls(params, **kwargs | ({"lr": 0.1} if info.name in THEIRS else {}))
        for _ in range(30):
            given(info, opt, params, [p.detach() for p in params])
        for p in params:
            assert (p.abs() > 2).all() if kwargs.get("maximize") else (p.abs() < 2).all(), kwargs


def test_fused_does_not_step_if_foundinf(info):
    """`GradScaler` tells a fused optimizer of an overflow, and the optimizer does nothing."""
    if "cpu" not in info.supports_fused_on:
        return
    problem = Problem()
    opt = info.optim_cls(problem.params, fused=True)
    start = [p.detach().clone() for p in problem.params]
    for p in problem.params:
        p.grad = torch.ones_like(p)
    opt.found_inf, opt.grad_scale = torch.ones(()), None
    opt.step()
    assert_equal(problem.params, start)


def test_differentiable(info):
    if "differentiable" in info.supported_impls or info.name in OURS:
        info.optim_cls(Problem().params, differentiable=True)


def test_capturable(info):
    if info.has_capturable_arg or info.name in OURS:
        info.optim_cls(Problem().params, capturable=True)


# -- gradients -----------------------------------------------------------------------------------


def test_step_is_noop_when_params_have_no_grad(info):
    for kwargs in inputs_of(info):
        problem = Problem()
        start = [p.detach().clone() for p in problem.params]
        opt = info.optim_cls(problem.params, **kwargs)
        given(info, opt, problem.params, [None, None])
        assert_equal(problem.params, start)


def test_step_is_noop_for_zero_grads(info):
    for kwargs in inputs_of(info):
        if kwargs.get("weight_decay"):
            continue
        problem = Problem()
        start = [p.detach().clone() for p in problem.params]
        opt = info.optim_cls(problem.params, **kwargs)
        for _ in range(3):
            given(info, opt, problem.params, [torch.zeros_like(p) for p in start])
        assert_equal([p.detach() for p in problem.params], start)


def test_grads_are_never_inplaced_into(info):
    for kwargs in inputs_of(info):
        problem = Problem()
        opt = info.optim_cls(problem.params, **kwargs)
        seen = []
        whole = problem.loss

        def loss():
            if problem.weight.grad is None:
                return whole()
            raise AssertionError("the closure zeroes the gradients")

        def post(opt, args, kwargs):
            seen.append([p.grad._version for p in problem.params])

        problem.loss = loss
        opt.register_step_post_hook(post)
        problem.run(info, opt, 3)
        assert seen == [[0, 0]] * 3, kwargs


def test_second_order_optims_return_consistent_types(info):
    """The closure's loss, as the closure returned it."""
    for returned in (torch.tensor(2.5), 2.5):
        problem = Problem()
        opt = info.optim_cls(problem.params)

        def closure():
            opt.zero_grad()
            problem.loss().backward()
            return returned

        for _ in range(2):
            assert type(opt.step(closure)) is type(returned)


# -- state ---------------------------------------------------------------------------------------


def test_non_empty_state(info):
    for kwargs in inputs_of(info):
        problem = Problem()
        opt = info.optim_cls(problem.params, **kwargs)
        problem.run(info, opt, 2)
        if info.name == "SGD" and not kwargs.get("momentum"):
            continue
        states = list(opt.state.values())
        assert states, kwargs
        assert all(states), kwargs


def test_state_dict_deterministic(info):
    """A copy that loads the state goes on as the run does, bit by bit."""
    for kwargs in inputs_of(info):
        problem = Problem()
        opt = info.optim_cls(problem.params, **kwargs)
        problem.run(info, opt, 4)
        twin = copy.deepcopy(problem)
        resumed = info.optim_cls(twin.params, **copy.deepcopy(kwargs))
        resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert_equal(problem.run(info, opt, 4), twin.run(info, resumed, 4))
        assert_equal(opt.state_dict()["state"], resumed.state_dict()["state"])
        # Loading twice, and loading what one has, changes nothing.
        resumed.load_state_dict(resumed.state_dict())
        assert_equal(opt.state_dict()["state"], resumed.state_dict()["state"])


def test_can_load_older_state_dict(info):
    """Options that came after the first version may be missing in a saved group."""
    flags = {"foreach", "fused", "maximize", "differentiable", "capturable"}
    for kwargs in inputs_of(info, ways=False):
        problem = Problem()
        opt = info.optim_cls(problem.params, **kwargs)
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
        ends = []
        for load in (False, True):
            problem = Problem()
            params = list(zip(saved_names, problem.params)) if saved_names else problem.params
            opt = info.optim_cls(params)
            problem.run(info, opt, 3)
            if load:
                saved = opt.state_dict()
                opt = info.optim_cls(
                    list(zip(own_names, problem.params)) if own_names else problem.params
                )
                opt.load_state_dict(saved)
            ends.append(problem.run(info, opt, 3))
        assert_equal(*ends)
        assert opt.param_groups[0]["param_names"] == (saved_names or own_names)  # as torch


def test_save_load_equality_with_weights_only(info):
    for kwargs in inputs_of(info):
        problem = Problem()
        opt = info.optim_cls(problem.params, **kwargs)
        problem.run(info, opt, 3)
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_equal(loaded["state"], opt.state_dict()["state"])
        assert loaded["param_groups"] == opt.state_dict()["param_groups"]
        opt.load_state_dict(loaded)


def test_deepcopy_copies_all_public_attrs(info):
    def public(opt):
        return {name for name in vars(opt) if not name.startswith("_")}

    for kwargs in inputs_of(info):
        problem = Problem()
        opt = info.optim_cls(problem.params, **kwargs)
        problem.run(info, opt, 2)
        assert public(opt) == public(copy.deepcopy(opt)), kwargs


def test_optimizer_can_be_printed(info):
    for kwargs in inputs_of(info):
        problem = Problem()
        opt = info.optim_cls(problem.params, **kwargs)
        before = repr(opt)
        assert info.name in before
        problem.run(info, opt, 1)
        assert repr(opt) == before


# -- hooks ---------------------------------------------------------------------------------------


def test_step_all_hooks(info):
    problem, order = Problem(), []
    opt = info.optim_cls(problem.params)

    def says(word):
        return lambda opt, args, kwargs: order.append(word)

    handles = [
        register_optimizer_step_pre_hook(says("all, before")),
        opt.register_step_pre_hook(says("before")),
        opt.register_step_post_hook(says("after")),
        register_optimizer_step_post_hook(says("all, after")),
    ]
    problem.run(info, opt, 2)
    for handle in handles:
        handle.remove()
    problem.run(info, opt, 1)
    assert order == ["all, before", "before", "after", "all, after"] * 2


def test_step_pre_hook(info):
    """A hook before a step may change what the step is told; one after it sees what was told."""
    problem, seen = Problem(), []
    opt = info.optim_cls(problem.params)
    if not info.step_requires_closure:
        problem.run(info, opt, 1)

    def closure():
        opt.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    opt.register_step_pre_hook(lambda opt, args, kwargs: ((opt, closure), {}))
    opt.register_step_post_hook(lambda opt, args, kwargs: seen.append((args, kwargs)))
    assert opt.step(None) is not None
    assert seen == [((opt, closure), {})]


def test_state_dict_pre_post_hook(info):
    opt = info.optim_cls(Problem().params)
    calls = []
    opt.register_state_dict_pre_hook(lambda opt: opt.param_groups[0].update(mark="before"))

    def post(opt, state_dict):
        calls.append(state_dict["param_groups"][0]["mark"])
        return state_dict | {"more": 1}

    opt.register_state_dict_post_hook(lambda opt, state_dict: calls.append("second"))
    handle = opt.register_state_dict_post_hook(post, prepend=True)
    assert opt.state_dict()["more"] == 1
    assert calls == ["before", "second"]
    handle.remove()
    assert "more" not in opt.state_dict()


def test_load_state_dict_pre_post_hook(info):
    problem = Problem()
    opt = info.optim_cls(problem.params)
    problem.run(info, opt, 2)
    options = {"weight_decay": 0.25} if info.name == "Untuned" else {"lr": 0.25}
    saved, order = opt.state_dict(), []

    def change(opt, state_dict):
        order.append("before")
        groups = [group | options for group in state_dict["param_groups"]]
        return state_dict | {"param_groups": groups}

    opt.register_load_state_dict_pre_hook(lambda opt, _: order.append("second"))
    opt.register_load_state_dict_pre_hook(change, prepend=True)
    opt.register_load_state_dict_post_hook(lambda opt: order.append("after"))
    opt.load_state_dict(saved)
    assert order == ["before", "second", "after"]
    assert options.items() <= opt.param_groups[0].items()


# -- the page ------------------------------------------------------------------------------------


def test_the_page_lists_the_differences():
    page = Path(__file__).parents[2].joinpath("docs/deviations.md").read_text()
    listed = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `test_")}
    assert listed >= DIFFERENCES.keys()
