"""Parameters that are added, removed, frozen and converted during a run, for every optimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from stormplus import Untuned
from tests.torch.optimizers import (
    Run,
    assert_same,
    every,
    noise,
    on,
    parameter,
    per_tensor,
    shared_numbers,
    values,
)


def descend(case, opt, params, steps=3):
    """Take steps with random gradients, the same ones for the same list of parameters."""
    rows = [noise(steps, *p.shape, seed=i).to(p.dtype) for i, p in enumerate(params)]
    case.descend(opt, params, list(zip(*rows)))


# -- added and removed ---------------------------------------------------------------------------


def steps_taken(case, opt):
    """Return the number of steps of the run, or of each parameter."""
    return (shared_numbers(opt)["step"] if case.paired else per_tensor(opt, "step")).tolist()


@every
def test_an_added_parameter_waits_for_its_first_gradient_and_takes_it_whole(case):
    run, extra, g = Run(case).train(0, 5), parameter(2.0, 3.0), parameter(1.0, -2.0).detach()
    opt, known = run.opt, run.opt.diagnostics()
    opt.add_param_group({"params": [extra], "lr" if case.paired else "factor": 0.5})
    assert opt.diagnostics() == known  # what the others have learned is kept

    def step(gradient):
        def evaluate():
            run.closure(5)()
            extra.grad = gradient

        case.step(opt, evaluate)

    step(None)
    assert torch.equal(extra, parameter(2.0, 3.0))
    step(g)
    state = opt.state[extra]
    assert torch.equal(state["estimator"] if case.paired else state["grad_rms"] * g.sign(), g)
    step(g)
    assert not torch.equal(extra, parameter(2.0, 3.0))
    assert steps_taken(case, opt) == (8 if case.paired else [8, 8, 8, 2])


@every
def test_removing_a_group_has_the_effect_of_freezing_it(case):
    runs = []
    for removed in (True, False):
        params = [parameter(10.0, -20.0), parameter(0.01, 0.02, 0.03), parameter(-1.0)]
        opt = case([{"params": params[:1]}, {"params": params[1:]}], lr=0.3)
        descend(case, opt, params)
        params[0].requires_grad_(False)
        params[0].grad = None
        if removed:
            del opt.param_groups[0]
        descend(case, opt, params[1:])
        runs.append(values(params))
        assert len(opt.state_dict()["state"]) == len(opt.parameters())
    assert_same(*runs)


@every
def test_a_parameter_that_is_appended_to_a_group_joins_without_a_name(case):
    p, q = parameter(1.0, 2.0), parameter(3.0, 4.0)
    opt = case([("first", p)])
    descend(case, opt, [p])
    opt.param_groups[0]["params"].append(q)
    descend(case, opt, [p, q])
    assert bool((q != parameter(3.0, 4.0)).all())
    with pytest.raises(FloatingPointError, match=r"parameter 1 of group 0, shape \(2,\)"):
        case.descend(opt, [p, q], [[torch.ones_like(p), torch.full_like(q, torch.nan)]])


# -- frozen --------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_frozen_parameter_is_left_out_and_keeps_its_buffers(case, which, set_to_none):
    """Unfrozen, Untuned goes on; the estimator of a pair is that of another point."""
    run = Run(case, samples=20)
    opt, params, subject = run.opt, run.params, run.params[which]

    def train(start, stop, use=True):
        used = [p if use or p is not subject else p.detach() for p in params]
        for xi in run.problem.samples[start:stop]:
            case.step(opt, on(opt, lambda: run.problem.loss(used, xi), set_to_none))

    train(0, 5)
    numbers = opt.diagnostics()
    subject.requires_grad_(False)
    assert opt.diagnostics() == numbers
    held, state = values([subject]), copy.deepcopy(opt.state[subject])
    train(5, 9)
    subject.requires_grad_(True)
    opt.zero_grad()
    train(9, 11, use=False)
    assert_same(values([subject]), held)
    if case.paired:
        assert not opt.state.get(subject, {}).get("initialized")
    else:
        assert_same(opt.state[subject], state)
    train(11, 12)
    if case.paired:
        assert torch.equal(opt.state[subject]["estimator"], subject.grad)
    train(12, 20)
    assert not torch.equal(subject, held[0])
    expected = 20 if case.paired else [14 if i == which else 20 for i in range(3)]
    assert steps_taken(case, opt) == expected


@every
def test_a_parameter_that_is_frozen_from_the_start_is_ignored(case):
    run, alone = Run(case), Run(case)
    run.params[0].requires_grad_(False)
    run.opt, alone.opt = case(run.params), case(alone.params[1:])
    assert_same(values(run.train().params), values(alone.train().params))
    assert run.opt.diagnostics() == alone.opt.diagnostics()
    assert run.opt.state[run.params[0]].keys().isdisjoint(case.buffers)  # it costs no memory
    run.params[0].requires_grad_(True)
    run.train()
    assert run.opt.state[run.params[0]]["initialized"]


# -- converted -----------------------------------------------------------------------------------


@every
def test_a_module_moved_to_another_dtype_takes_its_buffers_along(case):
    model = nn.Linear(3, 2)
    opt = case(model.parameters(), lr=0.1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        known = {name: opt.state[model.weight][name].clone() for name in case.buffers}
        model.to(dtype)
        opt.state_dict()  # which looks where the parameters are
        for name, buffer in known.items():
            moved = opt.state[model.weight][name]
            assert torch.equal(moved, buffer.to(moved.dtype))
        for _ in range(3):
            case.step(opt, on(opt, lambda: model(torch.ones(4, 3, dtype=dtype)).square().mean()))
        for name in case.buffers:
            expected = torch.float32 if dtype == torch.bfloat16 else dtype
            assert opt.state[model.weight][name].dtype == expected
    assert opt.diagnostics()["step"] == 9


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
        descend(case, opt, params)
        if changes:
            saved = opt.state_dict()
            model.to(memory_format=formats[1])
            if loads:
                opt = case(params)
                opt.load_state_dict(saved)
            opt.zero_grad()
        descend(case, opt, params)
        runs.append(values(params))
        for name in case.buffers[:2]:
            assert opt.state[params[0]].get(name, params[0]).stride() == params[0].stride()
    torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)


# -- foreign state ------------------------------------------------------------------------------


@every
def test_foreign_entries_of_the_state_are_left_alone(case):
    p = parameter(1.0, 2.0)
    opt = case([p])
    opt.state["mine"], opt.state["count"] = {"n": 1}, 1
    descend(case, opt, [p])
    opt.add_param_group({"params": [parameter(3.0)]})
    saved = opt.state_dict()["state"]
    assert (saved["mine"], saved["count"]) == ({"n": 1}, 1)


def test_saving_leaves_the_buffers_of_a_parameter_with_gaps_where_they_are():
    p = nn.Parameter(torch.randn(6, 8)[:, ::2])
    opt = Untuned([p])
    before = opt.state[p]["z_minus_x"].data_ptr()
    opt.state_dict()
    assert opt.state[p]["z_minus_x"].data_ptr() == before


@every
def test_freezing_around_eval_keeps_the_addresses_of_the_numbers(case):
    """A captured CUDA graph goes on writing to them."""
    params = [parameter(1.0, 2.0), parameter(3.0)]
    opt = case(params)
    descend(case, opt, params)
    tables = opt._shared_table.tensor, opt._tensor_table.tensor
    for flag in (False, True):
        for p in params:
            p.requires_grad_(flag)
        opt.state_dict()
    descend(case, opt, params)
    assert opt._shared_table.tensor is tables[0]
    assert opt._tensor_table.tensor is tables[1]


@every
def test_a_frozen_parameter_without_memory_may_be_passed_along(case):
    offloaded = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    x = nn.Parameter(torch.ones(3))
    opt = case([x, offloaded])
    case.descend(opt, [x], [[g] for g in torch.ones(3, 3)])
    assert (x < 1).all()


@every
def test_a_frozen_parameter_may_be_emptied(case):
    params = [parameter(1.0, 2.0), parameter(3.0)]
    opt = case(params)
    descend(case, opt, params)
    params[0].requires_grad_(False)
    params[0].data, params[0].grad = torch.empty(0, dtype=params[0].dtype), None
    opt.load_state_dict(opt.state_dict())
    if not case.paired:
        opt.eval()
        opt.train()
    before = params[1].clone()
    case.descend(opt, params[1:], [[g] for g in noise(2, 1)])
    assert not torch.equal(params[1], before)


# -- dtypes of gradients -------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a newer torch")
@every
def test_gradients_of_different_dtypes_do_not_share_a_pass(case):
    params = [parameter(1.0, 2.0, dtype=torch.float32) for _ in range(2)]
    params[1].grad_dtype = torch.bfloat16
    for p in params:
        p.grad = torch.ones(2, dtype=p.grad_dtype)
    opt = case(params)
    # A Triton kernel would read all gradients of a group with the dtype of the first.
    assert [group.indices for group in opt._tensor_groups()] == [[0], [1]]
    opt.estimate() if case.paired else opt.step()
    assert torch.equal(params[0], params[1])


# -- tensors that wrap others ---------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as torchao's do."""

    KEPT = tuple(
        getattr(torch.ops.aten, name).default
        for name in ("detach", "zeros_like", "empty_like", "clone", "permute", "view")
    )

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = function(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if function in cls.KEPT else result


@every
def test_a_wrapped_tensor_trains_as_the_one_inside(case):
    inner, plain = parameter(1.0, 2.0), parameter(1.0, 2.0)
    wrapped = nn.Parameter(Wrapped(inner.detach()))
    for p in (wrapped, plain):
        gradients = [Wrapped(g) if p is wrapped else g for g in noise(3, 2)]
        case.descend(case([p]), [p], [[g] for g in gradients])
    torch.testing.assert_close(wrapped.inner, plain.detach())
