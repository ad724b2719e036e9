"""What every torch optimizer of the package does: one table, one property after another.

test_parameters.py, test_checkpoints.py and test_refused.py use the same table.
"""

import copy
import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

import stormplus.torch as package
from tests.support.oracle import Group
from tests.support.problems import Network
from tests.torch.optimizers import (
    CASES,
    QUICK,
    Run,
    assert_same,
    every,
    every_paired,
    everything,
    halves,
    noise,
    on,
    parameter,
    per_tensor,
    shared_numbers,
    step_sizes,
    values,
)


def test_the_table_has_every_public_optimizer():
    public = {getattr(package, name) for name in package.__all__}
    optimizers = {
        cls for cls in public if isinstance(cls, type) and issubclass(cls, package.BaseOptimizer)
    }
    abstract = {package.BaseOptimizer, package.PairedOptimizer}
    assert optimizers - abstract <= {case.cls for case in CASES}


F64 = torch.float64

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
        case.step(opt, on(opt, lambda: problem.loss(params, xi)))
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
@pytest.mark.parametrize(
    ("factor", "dtype"),
    [
        (1e-140, F64), (1e-6, F64), (1e6, F64), (1e120, F64),
        (1e-30, torch.float32), (1e30, torch.float32),  # their squares leave float32
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("unit", ["first", "a number"])
def test_a_loss_that_is_multiplied_by_its_unit_makes_the_same_run(case, factor, dtype, unit):
    """Untuned needs no unit; it runs with and without weight decay."""
    runs = []
    for times in (1.0, factor):
        options = {"lr": 0.1, "unit": times if unit == "a number" else "first"}
        if not case.paired:
            options = {"weight_decay": 0.5 if unit == "a number" else 0.0}
        run = Run(case, samples=30, dtype=dtype, **options)
        for xi in run.problem.samples:
            case.step(run.opt, on(run.opt, lambda: times * run.problem.loss(run.params, xi)))
        runs.append((values(run.params), run.opt.diagnostics()))
    (expected, bare), (found, scaled) = runs
    rounding = {"rtol": 1e-9, "atol": 1e-11} if dtype == F64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **rounding)
    for name in {"unit", "grad_norm", "estimator_norm"} & bare.keys():  # as they are measured
        bare[name] *= factor
    assert scaled == pytest.approx(bare, rel=1e-8 if dtype == F64 else 1e-4)


@every
@pytest.mark.parametrize("value", [0.0, 1e-30, 6e4, 1e20, 1e38, 1e60])
def test_extreme_gradients_are_finite(case, value):
    dtype = {6e4: torch.float16, 1e60: torch.float64}.get(value, torch.float32)
    p = nn.Parameter(torch.ones(1, dtype=dtype))
    opt = case([p])
    case.descend(opt, [p], [[torch.full_like(p, sign * value)] for sign in (1, -1, 1, 1)])
    assert torch.isfinite(p).all()
    if case.paired:
        numbers, exact = opt.diagnostics(), float(torch.full_like(p, value).double())
        assert 0 < numbers["gain"] <= 1
        assert numbers["grad_norm"] == pytest.approx(exact)
        assert numbers["sum_g_sq"] == pytest.approx(4 * exact**2)
    if value == 0:
        assert p.item() == 1


@every
def test_diagnostics_are_plain_floats(case):
    run = Run(case).train()
    numbers, distances = run.opt.diagnostics(), {"step", "step_size", "distance"}
    names = distances | {name + end for name in distances for end in ("_min", "_max")}
    if case.paired:
        names = {"step", "gain", "step_size", "grad_norm", "estimator_norm", "sum_g_sq"}
        names |= {"sum_d_sq_over_a", "unit"}
    assert numbers.keys() == names | {"grad_evaluations"}
    assert all(type(number) is float for number in numbers.values())
    assert numbers["step_size"] == pytest.approx(float(step_sizes(run.opt).mean()))
    if case.paired:
        g = torch.cat([p.grad.flatten() for p in run.params])
        assert numbers["grad_norm"] == pytest.approx(float(g.norm()), rel=1e-12)
    else:
        assert numbers["distance"] == float(per_tensor(run.opt, "distance").max())
        assert numbers["step_size_max"] == float(per_tensor(run.opt, "step_size").max())


# -- kinds of parameters -------------------------------------------------------------------------


@every
def test_mixed_dtypes_shapes_and_layouts_in_one_optimizer(case):
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 4)
    tensors = [
        torch.randn(3, dtype=torch.float64),
        torch.randn(4, 5),
        torch.randn(6).bfloat16(),
        torch.randn(7).half(),
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
        tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(p.dtype, 1e-5)
        torch.testing.assert_close(p.double(), q, rtol=tolerance, atol=tolerance)
        if not case.paired and p.dtype in (torch.bfloat16, torch.float16):
            master = opt.state[p]["master"]  # most steps are below a rounding of p
            torch.testing.assert_close(master.double(), q, rtol=0, atol=5e-4)
    assert not any(p.is_contiguous() for p in params[-3:])


@every
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"state_dtype": torch.bfloat16}], ids=str
)
def test_complex_parameters_are_pairs_of_reals(case, options):
    if case.paired and "state_dtype" in options:
        pytest.skip("an option of Untuned")
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
def test_the_state_has_the_promised_size(case):
    p = nn.Parameter(torch.randn(1000, 500))
    tensors = [v for v in case([p]).state_dict()["state"][0].values() if torch.is_tensor(v)]
    size = sum(t.nbytes for t in tensors)
    assert size == pytest.approx((1 if case.paired else 2) * p.nbytes, rel=0.01)


# -- gradients -----------------------------------------------------------------------------------


@every_paired
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_missing_gradient_is_a_zero_gradient(case, decay):
    # By both modes of zero_grad: a parameter that takes part in one sample of three.
    runs = []
    for set_to_none in (True, False):
        problem, extra = Network(samples=20), parameter(1.0, 2.0, 3.0)
        params = problem.parameters()
        opt = case([*params, extra], weight_decay=decay)
        for i, xi in enumerate(problem.samples):

            def loss():
                return problem.loss(params, xi) + (torch.sin(extra).sum() if i % 3 == 0 else 0)

            case.step(opt, on(opt, loss, set_to_none))
        runs.append(everything(opt))
        assert not torch.equal(extra, parameter(1.0, 2.0, 3.0))
    # Native passes take tensors together, which decides the order of a sum.
    rounding = 0.0 if case.path else 1e-11
    torch.testing.assert_close(*runs, rtol=rounding, atol=rounding)


@every
def test_gradients_are_never_written_or_kept(case):
    run = Run(case, samples=3, weight_decay=0.5, maximize=True)
    opt, params = run.opt, run.params
    for i in range(3):
        kept = []

        def evaluate():
            run.closure(i)()
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
def test_a_step_with_a_closure_under_no_grad_returns_its_first_loss(case):
    run = Run(case, samples=5)
    with torch.no_grad():
        for i, xi in enumerate(run.problem.samples):
            before = run.problem.loss(run.params, xi)
            assert torch.equal(run.opt.step(run.closure(i)), before)
    assert_same(run.everything(), Run(case, samples=5).train().everything())
    assert run.opt.step(lambda: (run.closure(0)(), 2.5)[1]) == 2.5  # whatever the closure returns


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
def test_an_optimizer_that_is_dropped_frees_its_parameters_at_once(case):
    run = Run(case, samples=4).train()
    alive = [weakref.ref(p) for p in run.params]
    gc.disable()
    try:
        del run
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


@every
@pytest.mark.parametrize("default", ["device", "dtype"])
def test_torchs_default_device_dtype_and_random_stream_are_not_used(case, default):
    runs, rows = [], [[g] for g in noise(3, 2, dtype=torch.float32)]
    stream = torch.get_rng_state()
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
    assert torch.equal(torch.get_rng_state(), stream)


# -- hooks ---------------------------------------------------------------------------------------


@pytest.fixture
def fired():
    """Return a list to which hooks of all optimizers write."""
    names = []
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: names.append("before all")),
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: names.append("after all")),
    ]
    yield names
    for handle in handles:
        handle.remove()


@every
def test_step_hooks_fire_once_per_step_and_once_per_pair_of_halves(case, fired):
    run = Run(case)
    run.opt.register_step_pre_hook(lambda *_: fired.append("before"))
    run.opt.register_step_post_hook(lambda *_: fired.append("after"))
    for i in range(6):
        step = halves if case.paired and i % 2 == 0 else case.step
        step(run.opt, run.closure(i))
    assert fired == ["before all", "before", "after", "after all"] * 6


@every
def test_pass_hooks_are_called_until_they_are_removed_and_copies_have_none(case):
    run, events = Run(case), []
    hook = run.opt.register_pass_hook(lambda o, event: events.append((o, event)))
    run.train(0, 2)
    pair = ["before_move", "after_move", "before_estimate", "after_estimate"]
    names = ["before_step", "after_step"] * 2
    if case.paired:
        run.opt.restart()
        names = [*pair[2:], *pair, "restarted"]
    expected = [(run.opt, name) for name in names]
    assert events == expected
    copy.deepcopy(run).train(2, 3)
    hook.remove()
    run.train(2, 3)
    assert events == expected
