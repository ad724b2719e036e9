"""What every torch optimizer of the package does alike: one table, one property after another.

test_parameters.py and test_checkpoints.py go on with the same table.
"""

import copy
import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from optimizers import (
    CASES,
    QUICK,
    assert_same,
    every,
    every_paired,
    everything,
    halves,
    made,
    noise,
    on,
    parameter,
    per_tensor,
    shared_numbers,
    state_tensors,
    step_sizes,
    values,
)
from oracle import Group
from problems_for_tests import Network, backward
from torch import nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

import stormplus.torch as package


def test_the_table_has_every_public_optimizer():
    public = {getattr(package, name) for name in package.__all__}
    optimizers = {
        cls for cls in public if isinstance(cls, type) and issubclass(cls, package.BaseOptimizer)
    }
    abstract = {package.BaseOptimizer, package.PairedOptimizer}
    assert optimizers - abstract <= {case.cls for case in CASES}


# -- the numbers ---------------------------------------------------------------------------------

# Both sides round at 1e-16 a few hundred times a step, and the runs contract: 1e-10 leaves three
# digits of room, and a wrong formula is off by far more.
DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
OPTIONS = {
    "default": {"lr": 1.0},
    "tensor lr": {"lr": torch.tensor(0.5, dtype=torch.float64)},
    "L2": {"weight_decay": 0.1},
    "decoupled": DECOUPLED,
    "maximize": {"maximize": True, "weight_decay": 0.3, "lr": 0.2},
    "unit": {"unit": 0.4},
    "first": {"unit": "first", "lr": 0.1},
    "first, L2": {"unit": "first", "lr": 0.1, "weight_decay": 0.1},
    "first, decoupled": {"unit": "first", "lr": 0.1} | DECOUPLED,
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
    if case.paired or name in ("default", "L2", "maximize")
]


def slower(index):
    return 1 - min(index, 50) / 100


@pytest.mark.parametrize(("case", "options"), PARITY)
def test_equals_the_oracle_with_groups_and_a_schedule(case, options):
    problem, options = Network(samples=200), {"lr": 0.3, "weight_decay": 0.0} | options
    lr, decay = options.pop("lr"), options.pop("weight_decay")
    rate = float(lr)
    # The scheduler's value at index t is in force when sample t + 1 makes a pair's t-th move.
    x, d, gain, step_size = case.oracle(
        problem,
        [
            Group(problem.x0[:2], lambda index: rate * slower(index), decay),
            Group(problem.x0[2:], lambda index: 0.7 * rate * slower(index), decay / 2),
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
    for p, q in zip(params, twins):
        tolerance = 0.05 if p.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p.double(), q, rtol=tolerance, atol=tolerance)
    assert not any(p.is_contiguous() for p in params[-3:])


@every
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=["", "decay"])
def test_complex_parameters_are_pairs_of_reals(case, options):
    rows = list(zip(noise(20, 4, 3, 2), noise(20, 5, 2, seed=1)))
    as_complex = [[torch.view_as_complex(g) for g in row] for row in rows]
    start = [noise(4, 3, 2, seed=2), noise(5, 2, seed=3)]
    params = [nn.Parameter(torch.view_as_complex(x.clone())) for x in start]
    reals = [nn.Parameter(x.clone()) for x in start]
    opt, twin = case(params, lr=0.3, **options), case(reals, lr=0.3, **options)
    case.descend(opt, params, as_complex)
    case.descend(twin, reals, rows)
    for p, q in zip(params, reals):
        torch.testing.assert_close(torch.view_as_real(p), q, rtol=1e-12, atol=1e-12)
    assert opt.diagnostics() == pytest.approx(twin.diagnostics())


@every
def test_an_entry_of_the_state_that_is_no_parameters_is_left_alone(case):
    p = nn.Parameter(torch.ones(3))
    opt = case([p])
    opt.state["mine"] = 1
    case.step(opt, on(opt, lambda: p.square().sum()))
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert opt.state_dict()["state"]["mine"] == opt.state["mine"] == 1


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
    # Fused and native passes take tensors together, which decides the order of a sum.
    rounding = 1e-11 if "foreach" not in case.path else 0.0
    torch.testing.assert_close(*runs, rtol=rounding, atol=rounding)


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
def test_a_step_under_no_grad_returns_the_loss_of_the_first_evaluation(case):
    problem, params, opt = made(case)
    with torch.no_grad():
        for xi in problem.samples[:5]:
            before = problem.loss(params, xi)
            assert torch.equal(opt.step(problem.closure(opt, params, xi)), before)
    assert opt.step(lambda: (problem.closure(opt, params, xi)(), 2.5)[1]) == 2.5  # as it is


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
    assert opt.diagnostics() == twin.diagnostics()
    assert_same(everything(opt), everything(twin))


@every
def test_one_bad_gradient_among_tensors_of_any_layout_is_found(case):
    p, q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 8)[:, :4])
    opt = case([p, q])
    for _ in range(3):
        case.step(opt, on(opt, lambda: (p * p).sum() + (q * q).sum()))
    held = q.detach().clone()
    with pytest.raises(FloatingPointError, match="nothing has moved"):
        case.step(opt, on(opt, lambda: (p * p).sum() + float("nan") * q.sum()))
    assert torch.equal(q, held)


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


# -- memory, devices and defaults ----------------------------------------------------------------


@every
def test_state_keeps_its_addresses(case):
    problem, params, opt = made(case, samples=2)
    case.train(problem, opt, params)
    before = state_tensors(opt)  # alive, so that their memory is not used for others
    case.train(problem, opt, params)
    moved = [k for k, t in state_tensors(opt).items() if t.data_ptr() != before[k].data_ptr()]
    assert moved == []


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
@pytest.mark.parametrize("default", ["device", "dtype"])
def test_torchs_default_device_and_dtype_are_not_used(case, default):
    runs, rows = [], [[g] for g in noise(3, 2, dtype=torch.float32)]
    for unusual in (True, False):
        p = parameter(1.0, 2.0, dtype=torch.float32)
        if unusual and default == "dtype":
            torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta") if unusual and default == "device" else nullcontext():
                opt = case([p])
                case.descend(opt, [p], rows)
                opt.load_state_dict(opt.state_dict())
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append(everything(opt))
    assert_same(*runs)


# -- what is refused -----------------------------------------------------------------------------

P = [nn.Parameter(torch.ones(2))]
REFUSED = {
    "negative lr": ({"lr": -1.0}, ValueError, "got -1.0"),
    "lr of nan": ({"lr": float("nan")}, ValueError, "got nan"),
    "lr of a string": ({"lr": "fast"}, ValueError, "got 'fast'"),
    "lr of two elements": ({"lr": torch.ones(2)}, ValueError, r"\(2,\)|tensor"),
    "negative decay": ({"weight_decay": -0.1}, ValueError, "weight_decay must be .* got -0.1"),
    "tensor decay": ({"weight_decay": torch.ones(())}, ValueError, "weight_decay must be"),
    "expanded": ({"params": [torch.ones(3, 1).expand(3, 4)]}, ValueError, "clone"),
    "conjugate": ({"params": [torch.ones(2, dtype=torch.cfloat).conj()]}, ValueError, "clone"),
    "sparse": ({"params": [torch.ones(2, 2).to_sparse()]}, TypeError, "to_dense"),
    "integers": ({"params": [torch.ones(2, dtype=torch.long)]}, TypeError, "got torch.int64"),
    "no parameters": ({"params": []}, ValueError, "empty parameter list"),
    "an empty group": ({"params": [{"params": []}]}, ValueError, "no parameter in them"),
    "lr of a group": ({"params": [{"params": P, "lr": -2.0}]}, ValueError, "got -2.0"),
    "unknown option": ({"weight_decoy": 0.9}, TypeError, "'weight_decoy'"),
}


@every
@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments(case, name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        case(**{"params": P} | options)


@every
def test_an_optimizer_of_a_part_of_the_parameters_is_refused(case):
    flat = nn.Parameter(torch.ones(2))
    flat._fsdp_flattened = True
    with pytest.raises(RuntimeError, match=r"\(FSDP1\).*fully_shard"):
        case([flat])
    caller = {"__name__": "torch.distributed.optim.optimizer", "make": case, "params": P}
    with pytest.raises(RuntimeError, match="gives the optimizer a part"):
        exec("make(params)", caller)  # nothing but the caller tells a part from a whole


def negative_lr(opt, p):
    opt.param_groups[0]["lr"] = -0.1


def sparse_gradient(opt, p):
    p.grad = torch.ones_like(p).to_sparse()


def resized(opt, p):
    p.data, p.grad = torch.ones(5, dtype=p.dtype), torch.ones(5, dtype=p.dtype)


def stale_gradient(opt, p):
    p.data = torch.ones(5, dtype=p.dtype)


def emptied_state(opt, p):
    opt.state.clear()


BAD_STEPS = {
    negative_lr: (ValueError, r"lr must be at least 0, got -0\.1"),
    sparse_gradient: (RuntimeError, r"parameter 0 of group 0.* is sparse"),
    resized: (ValueError, "resized"),
    stale_gradient: (RuntimeError, "resized"),
    emptied_state: (RuntimeError, r"call opt.reset\(\)"),
}


@every
@pytest.mark.parametrize("change", BAD_STEPS, ids=lambda change: change.__name__)
def test_a_step_that_cannot_be_taken_moves_nothing_until_a_reset(case, change):
    p, q = parameter(1.0, 2.0, 3.0), parameter(4.0)
    opt, (error, message) = case([p, q]), BAD_STEPS[change]
    case.descend(opt, [p, q], [[g, g[:1]] for g in noise(4, 3)])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    change(opt, p)
    held = values([p, q])
    with pytest.raises(error, match=message):
        case.step(opt, lambda: None)
    assert_same(values([p, q]), held)
    opt.param_groups[0]["lr"] = 1.0
    opt.reset()
    case.descend(opt, [p, q], [[g[: len(p)], g[:1]] for g in noise(3, 5)])
    assert all(bool((a != b).all()) for a, b in zip((p, q), held))


@every
def test_a_refused_group_and_a_refused_reset_change_nothing(case):
    problem, params, opt = made(case)
    case.train(problem, opt, params, problem.samples[:2])
    before, name = everything(opt), "lr" if case.paired else "factor"
    with pytest.raises(ValueError, match="got -1"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: -1.0})
    opt.param_groups[0]["weight_decay"] = -1.0
    with pytest.raises(ValueError, match="weight_decay must be"):
        opt.reset()
    assert_same(everything(opt), before)


# -- hooks ---------------------------------------------------------------------------------------


def by_step(case, opt, evaluate):
    case.step(opt, evaluate)


def by_halves(case, opt, evaluate):
    halves(opt, evaluate)


@pytest.mark.parametrize(
    ("case", "step"),
    [(case, step) for case in CASES for step in (by_step, by_halves)
     if step is by_step or case.paired],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_step_hooks_fire_once_a_step(case, step):
    problem, params, opt = made(case, samples=5)
    fired = []
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: fired.append("before all")),
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: fired.append("after all")),
        opt.register_step_pre_hook(lambda *_: fired.append("before")),
        opt.register_step_post_hook(lambda *_: fired.append("after")),
    ]
    try:
        for xi in problem.samples:
            step(case, opt, problem.closure(opt, params, xi))
    finally:
        for handle in handles:
            handle.remove()
    assert fired == ["before all", "before", "after", "after all"] * 5


@every
def test_pass_hooks_are_called_until_they_are_removed_and_copies_have_none(case):
    problem, params, opt = made(case)
    events = []
    hook = opt.register_pass_hook(lambda o, event: events.append((o, event)))
    case.train(problem, opt, params, problem.samples[:2])
    pair = ["before_move", "after_move", "before_estimate", "after_estimate"]
    names = [*pair[2:], *pair] if case.paired else ["before_step", "after_step"] * 2
    expected = [(opt, name) for name in names]
    assert events == expected
    twins, twin = copy.deepcopy((params, opt))
    case.train(problem, twin, twins, problem.samples[2:3])
    hook.remove()
    case.train(problem, opt, params, problem.samples[2:3])
    assert events == expected
