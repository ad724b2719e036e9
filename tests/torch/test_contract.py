"""What every torch optimizer of the package does alike: one table, one property after another."""

import copy
import gc
import pickle
import re
import sys
import weakref

import numpy as np
import pytest
import torch
from checkpoint_ways import through_dcp, through_flat_dcp, through_torch_save
from optimizers import (
    CASES,
    QUICK,
    assert_same,
    every,
    every_paired,
    everything,
    made,
    on,
    per_tensor,
    shared_numbers,
    step_sizes,
    values,
)
from oracle import Group
from problems_for_tests import Network, backward
from torch import nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

from stormplus.torch._checkpoint import FORMAT


def noise(shape, steps, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(steps, *shape, generator=draw, dtype=torch.float64).to(dtype)


def parameter(*numbers, dtype=torch.float64):
    return nn.Parameter(torch.tensor(numbers, dtype=dtype))


# -- the numbers ---------------------------------------------------------------------------------

# Both sides round at 1e-16 a few hundred times a step, and the runs contract: 1e-10 leaves three
# digits of room, and a wrong formula is off by far more.
OPTIONS = {
    "default": {"lr": 1.0},
    "L2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "maximize": {"maximize": True, "weight_decay": 0.3, "lr": 0.2},
    "unit": {"unit": 0.4},
    "first": {"unit": "first", "lr": 0.1},
    "first, L2": {"unit": "first", "weight_decay": 0.1, "lr": 0.1},
    "first, decoupled": {
        "unit": "first",
        "lr": 0.1,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    },
}
PARITY = [
    pytest.param(
        case,
        options,
        id=f"{case.name}-{name}",
        # The rules differ in two numbers: quickly, one of them meets every option.
        marks=() if name == "default" or case.name in QUICK else pytest.mark.long,
    )
    for case in CASES
    for name, options in OPTIONS.items()
    if case.paired or not {"unit", "decoupled_weight_decay"} & options.keys()
]


def slower(index):
    return 1 - min(index, 50) / 100


@pytest.mark.parametrize(("case", "options"), PARITY)
def test_equals_the_oracle_with_groups_and_a_schedule(case, options):
    problem, options = Network(samples=200), {"lr": 0.3, "weight_decay": 0.0} | options
    lr, decay = options.pop("lr"), options.pop("weight_decay")
    # The scheduler's value at index t is in force when sample t + 1 makes a pair's t-th move.
    x, d, gain, step_size = case.oracle(
        problem,
        [
            Group(problem.x0[:2], lambda index: lr * slower(index), decay),
            Group(problem.x0[2:], lambda index: 0.7 * lr * slower(index), decay / 2),
        ],
        **{name.replace("_weight_decay", ""): value for name, value in options.items()},
    )
    params = problem.parameters()
    first = {"params": params[:2]}
    other = {"params": params[2:], "lr": 0.7 * lr, "weight_decay": decay / 2}
    opt = case([first, other], lr=lr, weight_decay=decay, **options)
    schedule = lr_scheduler.LambdaLR(opt, slower)
    for xi in problem.samples:
        case.step(opt, problem.closure(opt, params, xi))
        schedule.step()
    found = [*params, *(opt.state[p][case.buffers[0]] for p in params)]
    for ours, theirs in zip(found, [*x, *d], strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-10, atol=1e-12)
    if case.paired:
        np.testing.assert_allclose(shared_numbers(opt)["gain"].numpy(), gain, rtol=1e-10)
    np.testing.assert_allclose(step_sizes(opt).numpy(), step_size, rtol=1e-10)
    assert opt.grad_evaluations == (399 if case.paired else 200)
    moved = [np.abs(block - start).max() for block, start in zip(x, problem.x0)]
    assert min(moved) > 1e-3  # the run has been somewhere


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_follows_float64(case, dtype):
    # x is rounded after each of 20 moves, bf16 to 8 bits, float16 to 11; d is not.
    problem, params, opt = made(case, 20, dtype, lr=0.3, weight_decay=0.1)
    exact = [nn.Parameter(p.detach().double()) for p in params]
    case.train(problem, opt, params)
    twin = case(exact, lr=0.3, weight_decay=0.1)
    case.train(problem, twin, exact)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for p, q in zip(params, exact):
        torch.testing.assert_close(p.double(), q, rtol=tolerance, atol=tolerance)
        assert opt.state[p][case.buffers[0]].dtype == torch.float32


@every_paired
@pytest.mark.parametrize("lr", [torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5])],
                         ids=["scalar", "vector"])  # fmt: skip
def test_a_tensor_lr_is_a_number(case, lr):
    ends = []
    for rate in (lr, 0.5, np.float64(0.5)):
        problem, params, opt = made(case, lr=rate)
        case.train(problem, opt, params)
        ends.append(values(params))
    for a, b, c in zip(*ends):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert torch.equal(b, c)


SCHEDULERS = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[3]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
}


@every
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_and_no_false_warning(case, name):
    problem, params, opt = made(case, samples=8)
    rates = []
    schedule = SCHEDULERS[name](opt)
    for xi in problem.samples:
        rates.append(float(opt.param_groups[0]["lr"]))
        case.step(opt, problem.closure(opt, params, xi))
        schedule.step(*[1.0] * (name == "ReduceLROnPlateau"))  # a warning is an error
    assert len(set(rates)) > 1


@every
@pytest.mark.parametrize("value", [0.0, 1e-30, 6e4, 1e20, 1e38, 1e60])
def test_extreme_gradients_are_finite(case, value):
    dtype = {6e4: torch.float16, 1e60: torch.float64}.get(value, torch.float32)
    p = nn.Parameter(torch.ones(1, dtype=dtype))
    opt = case([p])
    case.descend(opt, [p], [[torch.full_like(p, sign * value)] for sign in (1, -1, 1, 1)])
    numbers = opt.diagnostics()
    assert torch.isfinite(p).all()
    if case.paired:
        assert 0 < numbers["gain"] <= 1
        exact = float(torch.full_like(p, value).double())
        assert numbers["grad_norm"] == pytest.approx(exact)
        assert numbers["sum_g_sq"] == pytest.approx(4 * exact**2)
    if value == 0:
        assert p.item() == 1


# -- kinds of parameters -------------------------------------------------------------------------


@every
def test_mixed_dtypes_shapes_and_layouts_in_one_optimizer(case):
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 4)
    tensors = [
        torch.randn(3, dtype=torch.float64),
        torch.randn(4, 5),
        torch.randn(6).bfloat16(),
        torch.tensor(1.5),
        torch.randn(1),
        torch.empty(0, 7),
        torch.empty(1, 4).expand(0, 4),  # its strides are 0, and no element shares memory
        torch.randn(5, 4).t(),
        image.to(memory_format=torch.channels_last),
        torch.stack([image, image], dim=-1)[..., 0],
    ]
    params = [nn.Parameter(t) for t in tensors]
    opt = case(params, lr=0.3)
    twins = [nn.Parameter(t.detach().double().contiguous()) for t in tensors]
    twin = case(twins, lr=0.3)
    for _ in range(10):
        for o in (opt, twin):
            case.step(
                o, on(o, lambda: sum((1 - torch.cos(p.double())).sum() for p in o.parameters()))
            )
    for p, twin in zip(params, twins):
        tolerance = 0.05 if p.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p.double(), twin, rtol=tolerance, atol=tolerance)
    assert not any(p.is_contiguous() for p in params[-3:])


@every
def test_complex_parameters_are_pairs_of_reals(case):
    g, x = noise((4, 2), 20), noise((4, 2), 1, seed=1)[0]
    for options in ({}, {"unit": "first"} if case.paired else {"weight_decay": 0.1}):
        z, p = nn.Parameter(torch.view_as_complex(x.clone())), nn.Parameter(x.clone())
        opt, twin = case([z], lr=0.3, **options), case([p], lr=0.3, **options)
        case.descend(opt, [z], [[torch.view_as_complex(row)] for row in g])
        case.descend(twin, [p], [[row] for row in g])
        torch.testing.assert_close(torch.view_as_real(z), p, rtol=1e-12, atol=1e-12)
        assert opt.diagnostics() == pytest.approx(twin.diagnostics())


@every
def test_empty_tensors_change_nothing(case):
    problem, params, twin = made(case)
    case.train(problem, twin, params)
    others, empty = problem.parameters(), nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    opt = case([*others, empty])
    for xi in problem.samples:

        def evaluate():
            backward(problem, opt, others, xi)
            empty.grad = torch.zeros_like(empty)

        case.step(opt, evaluate)
    if not case.paired:
        opt.eval()
        opt.train()
    assert_same(values(others), values(params))
    assert opt.diagnostics() == twin.diagnostics()


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


@every
def test_the_state_is_the_buffers_and_scalars(case):
    p = nn.Parameter(torch.randn(1000, 500))
    opt = case([p])
    tensors = [v for v in opt.state_dict()["state"][0].values() if torch.is_tensor(v)]
    size = sum(t.nbytes for t in tensors)
    assert size == pytest.approx((1 if case.paired else 2) * p.nbytes, rel=0.01)


# -- gradients -----------------------------------------------------------------------------------


@every_paired
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_missing_gradient_is_a_zero_gradient(case, decay):
    # By both modes of zero_grad: a parameter that takes part in one sample of three.
    runs = []
    for set_to_none in (True, False):
        problem, params, _ = made(case, samples=20)
        extra = parameter(1.0, 2.0, 3.0)
        opt = case([*params, extra], weight_decay=decay)
        for i, xi in enumerate(problem.samples):

            def loss():
                return problem.loss(params, xi) + (torch.sin(extra).sum() if i % 3 == 0 else 0)

            case.step(opt, on(opt, loss, set_to_none))
        runs.append(everything(opt))
        assert not torch.equal(extra, parameter(1.0, 2.0, 3.0))
    # Fused and native passes take tensors together: who is there decides the order of a sum.
    rounding = 1e-11 if case.paired and "foreach" not in case.path else 0.0
    torch.testing.assert_close(*runs, rtol=rounding, atol=rounding)


@every
def test_a_parameter_without_a_gradient_so_far_waits_and_takes_the_first_one_whole(case):
    problem, params, opt = made(case)
    extra = parameter(2.0, 3.0)
    case.train(problem, opt, params, problem.samples[:5])
    known = opt.diagnostics()
    opt.add_param_group({"params": [extra], "lr" if case.paired else "factor": 0.5})
    assert opt.diagnostics() == known  # what the others have learned is kept
    g = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def evaluate(joins):
        opt.zero_grad()
        problem.loss(params, problem.samples[5]).backward()
        extra.grad = g.clone() if joins else None

    case.step(opt, lambda: evaluate(False))
    assert torch.equal(extra, parameter(2.0, 3.0))
    case.step(opt, lambda: evaluate(True))
    whole = (
        opt.state[extra]["estimator"] if case.paired else opt.state[extra]["grad_rms"] * g.sign()
    )
    assert torch.equal(whole, g)  # not a thousandth
    case.step(opt, lambda: evaluate(True))
    assert not torch.equal(extra, parameter(2.0, 3.0))
    steps = shared_numbers(opt)["step"] if case.paired else per_tensor(opt, "step")
    assert steps.tolist() == (8 if case.paired else [8, 8, 8, 2])
    assert opt.diagnostics()["step_size"] > 0


@every
def test_no_gradient_at_all(case):
    problem, params, opt = made(case)
    for p in params:
        p.grad = None
    before = everything(opt)
    if case.paired:
        with pytest.raises(RuntimeError, match="no parameter has a gradient: the closure must"):
            opt.step(lambda: problem.loss(params, problem.samples[0]))
        assert not opt.started
    else:
        opt.step()  # as torch's own optimizers
        case.train(problem, opt, params, problem.samples[:3])
        opt.zero_grad()
        before = everything(opt)
        opt.step()
    assert_same(everything(opt), before)


@every
def test_gradients_are_never_written_or_kept(case):
    problem, params, opt = made(case, weight_decay=0.5, maximize=True)
    for xi in problem.samples[:3]:
        kept = []

        def evaluate():
            backward(problem, opt, params, xi)
            kept[:] = [(p.grad, p.grad.clone()) for p in params]

        case.step(opt, evaluate)
        for p, (grad, was) in zip(params, kept):
            assert p.grad is grad
            assert torch.equal(grad, was)
            assert all(opt.state[p][name].data_ptr() != grad.data_ptr() for name in case.buffers)
        opt.zero_grad()
        alive = [weakref.ref(grad) for grad, _ in kept]
        del grad
        kept.clear()
        assert not any(grad() is not None for grad in alive)  # else a model's size of memory


@every
def test_the_global_random_stream_is_untouched(case):
    before = torch.get_rng_state()
    problem, params, opt = made(case)
    case.train(problem, opt, params)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert torch.equal(torch.get_rng_state(), before)


@every
def test_steps_work_under_no_grad_and_return_the_closures_loss(case):
    problem, params, opt = made(case)
    with torch.no_grad():
        for xi in problem.samples[:5]:
            before = problem.loss(params, xi)
            assert torch.equal(opt.step(problem.closure(opt, params, xi)), before)
    assert opt.diagnostics()["step"] == 5


@every
@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
@pytest.mark.parametrize(("when", "named"), [(0, False), (7, True)])
def test_a_gradient_that_is_not_finite_raises_and_nothing_has_changed(case, bad, when, named):
    problem, params, opt = made(case, named=named, weight_decay=0.1)
    _, twins, twin = made(case, named=named, weight_decay=0.1)
    events, name = [], r" \('c'\)" if named else r", shape \(3, 5\)"
    opt.register_pass_hook(lambda _, event: events.append(event))
    for i, xi in enumerate(problem.samples):
        if i != when:
            case.step(opt, problem.closure(opt, params, xi))
            case.step(twin, problem.closure(twin, twins, xi))
            continue
        before = everything(opt)

        def evaluate():
            backward(problem, opt, params, xi)
            params[2].grad.view(-1)[1] = bad

        message = f"parameter 2 of group 0{name} is not finite; nothing has moved"
        with pytest.raises(FloatingPointError, match=message):
            case.step(opt, evaluate)
        assert events[-1] == "failed"
        if not (case.paired and when == 0):  # where d is overwritten, before there is any
            assert_same(everything(opt), before)
    if case.paired:
        assert opt.diagnostics() == twin.diagnostics()
    assert_same(everything(opt), everything(twin))


@every
@pytest.mark.parametrize("steps", [0, 4])
def test_sparse_gradients_are_refused_before_anything_has_moved(case, steps):
    p = parameter(1.0, 2.0, 3.0)
    opt = case([p])
    case.descend(opt, [p], [[g] for g in noise((3,), steps)])
    held = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0.* is sparse.*sparse=False"):
        case.descend(opt, [p], [[torch.ones(3, dtype=p.dtype).to_sparse()]])
    assert torch.equal(p, held)
    assert opt.diagnostics()["step"] == steps


# Tensors are kept from step to step while they stay where they are: so all ways to move them.
MOVES = {
    "the state is shared": lambda p, state, names: [
        t.share_memory_()
        for t in (*state.values(), *state.get("scalars", {}).values())
        if isinstance(t, torch.Tensor)
    ],
    "buffers are others": lambda p, state, names: state.update(
        {n: state[n].clone() for n in names}
    ),
    "parameters are laid out otherwise": lambda p, state, names: setattr(
        p, "data", p.data.T.contiguous().T if p.ndim == 2 else p.data.clone()
    ),
}


@every
@pytest.mark.parametrize("how", MOVES)
def test_tensors_that_move_in_memory_are_followed(case, how):
    problem, params, opt = made(case, samples=12)
    _, twins, twin = made(case, samples=12)
    case.train(problem, twin, twins)
    case.train(problem, opt, params, problem.samples[:6])
    for p in params:
        MOVES[how](p, opt.state[p], case.buffers)
    case.train(problem, opt, params, problem.samples[6:])
    for p, q in zip(params, twins):  # another layout is added up in another order
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)


@every
def test_an_optimizer_that_is_dropped_lets_its_parameters_go_at_once(case):
    problem, params, opt = made(case, samples=4)
    case.train(problem, opt, params)
    alive = [weakref.ref(p) for p in params]
    gc.disable()
    try:
        del problem, params, opt
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


@every
def test_a_gradient_that_torch_negates_lazily_has_its_sign(case):
    # d/dp of the real part of conj(i p) i is 1; autograd hands over -1 and a bit.
    p = nn.Parameter(torch.tensor(1.0))
    opt = case([p])
    for _ in range(3):
        zero = torch.tensor(0.0)
        case.step(opt, on(opt, lambda: (torch.complex(zero, p).conj() * 1j).real))
    assert p.grad.is_neg()
    assert p < 1


@every
def test_one_bad_gradient_among_tensors_of_any_layout_is_found(case):
    p, q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 8)[:, :4])
    opt = case([p, q])
    for factor in (1.0, 1.0, 1.0):
        case.step(opt, on(opt, lambda f=factor: (p * p).sum() + f * (q * q).sum()))
    held = q.detach().clone()
    with pytest.raises(FloatingPointError, match="nothing has moved"):
        case.step(opt, on(opt, lambda: (p * p).sum() + float("nan") * q.sum()))
    assert torch.equal(q, held)


@every
def test_torchs_default_device_is_not_used(case):
    p = parameter(1.0, 2.0)
    q, rows = parameter(1.0, 2.0), [[g] for g in noise((2,), 3)]
    with torch.device("meta"):
        opt = case([p])
        case.descend(opt, [p], rows)
        opt.load_state_dict(opt.state_dict())
    twin = case([q])
    case.descend(twin, [q], rows)
    assert_same(everything(opt), everything(twin))


@every
def test_a_negative_lr_is_refused_at_the_step(case):
    p = parameter(1.0, 2.0)
    opt = case([p])
    case.descend(opt, [p], [[g] for g in noise((2,), 2)])
    held, opt.param_groups[0]["lr"] = p.detach().clone(), -0.1
    with pytest.raises(ValueError, match=r"lr must be at least 0, got -0\.1: a schedule"):
        case.descend(opt, [p], [[g] for g in noise((2,), 1)])
    assert torch.equal(p, held)


# -- freezing ------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("which", [0, 1])  # the first one would keep the numbers of the run
@pytest.mark.parametrize("set_to_none", [True, False])
def test_freezing_drops_the_buffers_and_unfreezing_starts_anew(case, which, set_to_none):
    problem, params, opt = made(case, samples=20)
    subject = params[which]

    def train(samples, use=True):
        used = [p if use or p is not subject else p.detach() for p in params]
        for xi in samples:
            case.step(opt, on(opt, lambda: problem.loss(used, xi), set_to_none))

    train(problem.samples[:5])
    numbers = opt.diagnostics()
    subject.requires_grad_(False)
    assert opt.diagnostics() == numbers
    held = subject.detach().clone()
    train(problem.samples[5:9])
    assert torch.equal(subject, held)
    assert opt.state[subject].keys().isdisjoint(case.buffers)  # its memory is free
    if case.paired:
        rest = [p.grad.square().sum() for p in params if p is not subject]
        assert opt.diagnostics()["grad_norm"] == pytest.approx(float(sum(rest).sqrt()))
    subject.requires_grad_(True)
    opt.zero_grad()
    train(problem.samples[9:11], use=False)
    assert torch.equal(subject, held)
    train(problem.samples[11:12])
    if case.paired:
        assert torch.equal(opt.state[subject]["estimator"], subject.grad)
    else:
        assert torch.equal(opt.state[subject]["initial_sample"], held.reshape(-1))
    train(problem.samples[12:])
    assert not torch.equal(subject, held)
    assert opt.diagnostics()["step"] == 20


@every
def test_frozen_from_the_start_even_as_the_first_parameter(case):
    problem, params, opt = made(case)
    _, others, twin = made(case)
    others[0].requires_grad_(False)
    alone = case([p for p in params if p is not params[0]])
    for xi in problem.samples:
        case.step(twin, problem.closure(twin, others, xi))
        case.step(alone, problem.closure(alone, params, xi))
    assert_same(values(others), values(params))
    assert alone.diagnostics() == twin.diagnostics()


@every
def test_frozen_parameters_cost_no_call(case):
    counts = []
    for frozen in (1, 1000):
        problem, params, _ = made(case)
        ballast = [nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(frozen)]
        opt = case([*params, *ballast])
        case.train(problem, opt, params, problem.samples[:3])
        calls = []

        def count(frame, event, _):
            if event == "call" and "stormplus" in frame.f_code.co_filename:
                calls.append(frame.f_code.co_name)

        evaluate = problem.closure(opt, params, problem.samples[3])
        sys.setprofile(count)
        try:
            case.step(opt, evaluate)
        finally:
            sys.setprofile(None)
        counts.append(len([name for name in calls if not name.startswith("<")]))
    assert counts[0] == counts[1] > 0


# -- what is refused, and what is told -----------------------------------------------------------

P = [nn.Parameter(torch.ones(2))]
REFUSED = [
    ({"lr": -1.0}, ValueError, "lr must be a finite number, at least 0, got -1.0"),
    ({"lr": float("nan")}, ValueError, "lr must be a finite number, at least 0, got nan"),
    ({"lr": "fast"}, ValueError, "lr must be a finite number, at least 0, got 'fast'"),
    ({"lr": torch.ones(2)}, ValueError, r"Tensor lr must be 1-element, got the shape \(2,\)"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay must be a finite number, at least 0, got"),
    ({"weight_decay": torch.ones(())}, ValueError, "weight_decay must be a finite number"),
    ({"params": [torch.ones(3, 1).expand(3, 4)]}, ValueError, r"shape \(3, 4\) is a conjug"),
    ({"params": [torch.ones(2, dtype=torch.cfloat).conj()]}, ValueError, "clone"),
    ({"params": [torch.ones(2, 2).to_sparse()]}, TypeError, "layout torch.sparse_coo: call to_d"),
    ({"params": []}, ValueError, "empty parameter list"),
    ({"params": [{"params": []}]}, ValueError, "no parameter in them"),
    ({"params": [{"params": P, "lr": -2.0}]}, ValueError, "got -2.0"),
    ({"params": [torch.ones(2, dtype=torch.long)]}, TypeError, "got torch.int64"),
    ({"weight_decoy": 0.9}, TypeError, "'weight_decoy'"),
]


@every
@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_arguments(case, options, error, message):
    if not case.paired:
        message = re.sub(r"^lr|^Tensor lr must.*", "factor", message)
    with pytest.raises(error, match=message):
        case(**{"params": P} | options)


@every
def test_a_part_of_the_parameters_is_refused(case):
    flat = nn.Parameter(torch.ones(2))
    flat._fsdp_flattened = True
    with pytest.raises(RuntimeError, match=r"\(FSDP1\) is a flat piece.*fully_shard"):
        case([flat])
    caller = {"__name__": "torch.distributed.optim.optimizer", "make": case, "params": P}
    with pytest.raises(RuntimeError, match="gives the optimizer a part"):
        exec("make(params)", caller)  # nothing but the caller tells a part from a whole


@every
def test_a_refused_group_leaves_no_trace(case):
    problem, params, opt = made(case)
    case.train(problem, opt, params, problem.samples[:2])
    name = "lr" if case.paired else "factor"
    with pytest.raises(ValueError, match="got -1"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: -1.0})
    assert len(opt.param_groups) == 1
    assert opt.parameters() == params
    case.train(problem, opt, params, problem.samples[2:])
    assert opt.diagnostics()["step"] == 12


@every
def test_printing_shows_the_groups_and_no_tensors(case):
    text = repr(made(case)[2])
    assert case.cls.__name__ in text
    assert "lr: 1.0" in text
    assert "tensor(" not in text


@every
def test_diagnostics_are_plain_floats(case):
    problem, params, opt = made(case)
    case.train(problem, opt, params)
    numbers = opt.diagnostics()
    assert all(type(v) is float for v in numbers.values())
    assert numbers["step_size"] == pytest.approx(float(step_sizes(opt).mean()))
    if not case.paired:
        names = {"step", "step_size", "distance"}
        names |= {name + end for name in names for end in ("_min", "_max")}
        assert set(numbers) == names | {"grad_evaluations"}
        assert numbers["distance"] == float(per_tensor(opt, "distance").max())
        assert numbers["step_size_max"] == float(per_tensor(opt, "step_size").max())
        return
    assert set(numbers) == {
        "step", "gain", "step_size", "grad_norm", "estimator_norm", "sum_g_sq",
        "sum_d_sq_over_a", "unit", "grad_evaluations",
    }  # fmt: skip
    each = [float(p.grad.square().sum()) for p in params]
    assert numbers["grad_norm"] == pytest.approx(sum(each) ** 0.5, rel=1e-12)


# -- hooks ---------------------------------------------------------------------------------------


@every
def test_step_hooks_fire_once_a_step(case):
    problem, params, opt = made(case, samples=5)
    fired = []
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: fired.append("before all")),
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: fired.append("after all")),
        opt.register_step_pre_hook(lambda *_: fired.append("before")),
        opt.register_step_post_hook(lambda *_: fired.append("after")),
    ]
    try:
        case.train(problem, opt, params)
    finally:
        for handle in handles:
            handle.remove()
    assert fired == ["before all", "before", "after", "after all"] * 5


@every
def test_pass_hooks_are_told_until_they_are_removed_and_copies_have_none(case):
    problem, params, opt = made(case)
    told, later = [], []
    first = opt.register_pass_hook(lambda o, event: told.append((o, event)))
    second = opt.register_pass_hook(lambda o, event: later.append(event))
    case.train(problem, opt, params, problem.samples[:2])
    pair = ["before_move", "after_move", "before_estimate", "after_estimate"]
    expected = [*pair[2:], *pair] if case.paired else ["before_step", "after_step"] * 2
    assert [event for _, event in told] == expected == later
    assert all(o is opt for o, _ in told)
    first.remove()
    twins, twin = copy.deepcopy((params, opt))
    case.train(problem, twin, twins, problem.samples[2:3])
    assert len(later) == len(expected)
    case.train(problem, opt, params, problem.samples[2:3])
    assert len(told) == len(expected) < len(later)
    second.remove()


@every
def test_the_users_hooks_of_loading_see_all_and_have_the_last_word(case):
    problem, params, opt = made(case)
    case.train(problem, opt, params)
    seen = []
    opt.register_state_dict_post_hook(lambda _, saved: seen.append(numbers(saved)["format"]))
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
    assert seen == [FORMAT]
    assert torch.equal(twin.state[others[0]][name], 2 * opt.state[params[0]][name])
    assert (twin.state[others[1]][name] == 7).all()


# -- copies and states ---------------------------------------------------------------------------


@every
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike_and_apart(case, copied):
    problem, params, opt = made(case, weight_decay=0.1)
    case.train(problem, opt, params, problem.samples[:6])
    others, twin = copied((params, opt))
    for optimizer, tensors in ((opt, params), (twin, others)):
        case.train(problem, optimizer, tensors, problem.samples[6:])
    assert_same(everything(opt), everything(twin))
    assert opt.diagnostics() == twin.diagnostics()
    assert twin.diagnostics()["step"] == 12


@every
def test_reset_is_a_new_beginning_from_here(case):
    problem, params, opt = made(case, lr=0.5)
    case.train(problem, opt, params, problem.samples[:4])
    generation = opt.generation
    opt.reset()
    assert opt.generation == generation + 1
    fresh = case([nn.Parameter(p.detach().clone()) for p in params], lr=0.5)
    assert_same(everything(opt), everything(fresh))
    for optimizer in (opt, fresh):
        case.train(problem, optimizer, optimizer.parameters(), problem.samples[4:])
    assert_same(everything(opt), everything(fresh))


def in_memory(model, opt, new_model, new_opt, tmp_path):
    new_model.load_state_dict(model.state_dict())
    new_opt.load_state_dict(opt.state_dict())


ways = pytest.mark.parametrize(
    "way",
    [in_memory, through_torch_save, through_dcp, through_flat_dcp],
    ids=["memory", "torch.save", "dcp", "flat dcp"],
)


@every
@ways
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str
)
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
        way(model, opt, *resumed[:2], tmp_path / str(cut))
        assert resumed[1].generation > generation
        resumed[2].load_state_dict(schedule.state_dict())
        go_on(*resumed, samples[cut:])
        assert_same(everything(resumed[1]), everything(whole[1]))
        assert resumed[1].diagnostics() == whole[1].diagnostics()
        assert_same(everything(opt), before)  # loading has not shared memory


def trained(case, **options):
    problem, params, opt = made(case, samples=3, **options)
    case.train(problem, opt, params)
    return opt.state_dict()


def of_torch(cls):
    problem, params, opt = made(lambda params: cls(params))
    problem.run(opt, params, problem.samples[:2])
    return opt.state_dict()


def changed(saved, change):
    change(saved)
    return saved


def numbers(saved):
    return next(entry["scalars"] for entry in saved["state"].values() if "scalars" in entry)


def not_started(saved):
    for entry in saved["state"].values():
        entry["started"] = 0


OTHERS = {
    "Adam": (lambda case: of_torch(torch.optim.Adam), r"not the state of {} .*exp_avg"),
    "weights": (lambda case: {"weights": 1}, r"not an optimizer state: it has the keys \['wei"),
    "newer": (
        lambda case: changed(trained(case), lambda s: numbers(s).update(format=99)),
        "format 99, this version of stormplus reads",
    ),
    "in part": (
        lambda case: changed(trained(case), not_started),
        "loaded in part",
    ),
    "option": (
        lambda case: changed(trained(case), lambda s: s["param_groups"][0].pop("maximize")),
        "a parameter group of the state has no maximize",
    ),
    "kind": (
        lambda case: trained(CASES[-1 if case.paired else 0]), "saved with rule='.*', {} has rule="
    ),
    "rule": (
        lambda case: trained(next(other for other in CASES if other.cls is not case.cls)),
        "saved with rule='.*Rule', {} has rule=",
    ),
    "shapes": (
        lambda case: case([nn.Parameter(torch.ones(n)) for n in (20, 5, 15)]).state_dict(),
        r"parameter 0 has the shape \(20,\), the parameter \(5, 4\)",
    ),
    "count": (
        lambda case: case([nn.Parameter(torch.ones(5, 4))]).state_dict(), "loaded state dict"
    ),
}  # fmt: skip


@every
@pytest.mark.parametrize("name", OTHERS)
def test_other_states_are_refused_and_nothing_is_lost(case, name):
    problem, params, opt = made(case)
    case.train(problem, opt, params, problem.samples[:5])
    before, numbers, generation = everything(opt), opt.diagnostics(), opt.generation
    state, message = OTHERS[name]
    with pytest.raises(ValueError, match=message.format(case.cls.__name__)):
        opt.load_state_dict(state(case))
    assert_same(everything(opt), before)
    assert (opt.diagnostics(), opt.generation) == (numbers, generation)
