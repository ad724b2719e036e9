"""What every torch optimizer of the package does: one table, one property after another.

test_parameters.py and test_checkpoints.py use the same table.
"""

import copy
import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

import stormplus.torch as package
from tests.support.oracle import Group
from tests.support.problems_for_tests import Network
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
    run = Run(case, 20, dtype, lr=0.3, weight_decay=0.1)
    exact = Run(case, 20, lr=0.3, weight_decay=0.1)
    exact.copy_weights(run)
    run.train()
    exact.train()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for p, q in zip(run.params, exact.params):
        torch.testing.assert_close(p.double(), q, rtol=tolerance, atol=tolerance)
        assert run.opt.state[p][case.buffers[0]].dtype == torch.float32


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
def test_the_state_has_the_promised_size(case):
    p = nn.Parameter(torch.randn(1000, 500))
    tensors = [v for v in case([p]).state_dict()["state"][0].values() if torch.is_tensor(v)]
    size = sum(t.nbytes for t in tensors)
    assert size == pytest.approx((1 if case.paired else 2) * p.nbytes, rel=0.01)


# -- gradients -----------------------------------------------------------------------------------


@every
def test_micro_batches_inside_the_closure_are_one_sample(case):
    run, whole = Run(case), Run(case).train()
    for u, y in run.problem.samples:

        def evaluate():
            run.opt.zero_grad()
            for part in (slice(0, 3), slice(3, 8)):
                loss = run.problem.loss(run.params, (u[part], y[part]))
                (loss * len(u[part]) / 8).backward()

        case.step(run.opt, evaluate)
    torch.testing.assert_close(values(run.params), values(whole.params), rtol=1e-9, atol=1e-12)


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
def test_the_global_random_stream_is_untouched(case):
    before = torch.get_rng_state()
    run = Run(case).train()
    run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))
    assert torch.equal(torch.get_rng_state(), before)


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
@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
@pytest.mark.parametrize(("when", "named"), [(0, False), (7, True)])
def test_a_gradient_that_is_not_finite_raises_and_nothing_has_changed(case, bad, when, named):
    options = {"weight_decay": 0.1} | ({"unit": "first"} if case.paired else {})
    run, twin = (Run(case, named=named, **options) for _ in range(2))
    events, name = [], r" \('c'\)" if named else r", shape \(3, 5\)"
    run.opt.register_pass_hook(lambda _, event: events.append(event))
    run.train(0, when)
    before = run.everything()

    def evaluate():
        run.closure(when)()
        run.params[2].grad.view(-1)[1] = bad

    with pytest.raises(FloatingPointError, match=f"parameter 2 of group 0{name}"):
        case.step(run.opt, evaluate)
    assert events[-1] == "failed"
    if not (case.paired and when == 0):  # where d is overwritten, before there is any
        assert_same(run.everything(), before)
    run.train(when + 1)
    twin.train(0, when).train(when + 1)
    assert run.opt.diagnostics() == twin.opt.diagnostics()
    assert_same(run.everything(), twin.everything())


@every
def test_one_bad_gradient_among_tensors_of_any_layout_is_found(case):
    p, q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 8)[:, :4])
    opt = case([p, q])
    for _ in range(3):
        case.step(opt, on(opt, lambda: (p * p).sum() + (q * q).sum()))
    held = q.detach().clone()
    with pytest.raises(FloatingPointError, match="parameter 1"):
        case.step(opt, on(opt, lambda: (p * p).sum() + float("nan") * q.sum()))
    assert torch.equal(q, held)


@pytest.fixture
def shard():
    """Return a function that shards a tensor over a process group of one."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensor, "distribute_tensor"):
        pytest.skip("DTensor is not public before torch 2.5")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda t: tensor.distribute_tensor(t, mesh, [tensor.Shard(0)])
    dist.destroy_process_group()


@every
def test_a_shard_of_a_gradient_that_is_not_finite_is_found_by_name(case, shard):
    p = nn.Parameter(shard(torch.ones(4, 2)))
    opt = case([("layer.weight", p)])

    def evaluate():
        on(opt, lambda: (p * p).sum())()
        p.grad.to_local()[0, 0] = float("nan")

    with pytest.raises(FloatingPointError, match=r"layer\.weight"):
        case.step(opt, evaluate)


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
    "negative lr": ({"lr": -1.0}, ValueError, "-1.0"),
    "lr of nan": ({"lr": float("nan")}, ValueError, "nan"),
    "lr of a string": ({"lr": "fast"}, ValueError, "'fast'"),
    "lr of two elements": ({"lr": torch.ones(2)}, ValueError, r"\(2,\)|tensor"),
    "negative decay": ({"weight_decay": -0.1}, ValueError, "weight_decay .*-0.1"),
    "tensor decay": ({"weight_decay": torch.ones(())}, ValueError, "weight_decay"),
    "expanded": ({"params": [torch.ones(3, 1).expand(3, 4)]}, ValueError, r"\(3, 4\)"),
    "conjugate": ({"params": [torch.ones(2, dtype=torch.cfloat).conj()]}, ValueError, r"\(2,\)"),
    "sparse": ({"params": [torch.ones(2, 2).to_sparse()]}, TypeError, "torch.sparse_coo"),
    "integers": ({"params": [torch.ones(2, dtype=torch.long)]}, TypeError, "torch.int64"),
    "no parameters": ({"params": []}, ValueError, "parameter"),
    "an empty group": ({"params": [{"params": []}]}, ValueError, "parameter"),
    "lr of a group": ({"params": [{"params": P, "lr": -2.0}]}, ValueError, "-2.0"),
    "unknown option": ({"weight_decoy": 0.9}, TypeError, "'weight_decoy'"),
}


@every
@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments(case, name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        case(**{"params": P} | options)


@every
def test_a_parameter_that_fsdp1_has_flattened_is_refused(case):
    flat = nn.Parameter(torch.ones(2))
    flat._fsdp_flattened = True
    with pytest.raises(RuntimeError, match="fully_shard"):
        case([flat])


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
    negative_lr: (ValueError, "lr .*-0.1"),
    sparse_gradient: (RuntimeError, "parameter 0 of group 0"),
    resized: (ValueError, "resized"),
    stale_gradient: (RuntimeError, "parameter 0 of group 0"),
    emptied_state: (RuntimeError, r"opt.reset\(\)"),
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
    run = Run(case).train(0, 2)
    before, name = run.everything(), "lr" if case.paired else "factor"
    with pytest.raises(ValueError, match="-1"):
        run.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: -1.0})
    run.opt.param_groups[0]["weight_decay"] = -1.0
    with pytest.raises(ValueError, match="weight_decay"):
        run.opt.reset()
    assert_same(run.everything(), before)


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
def test_a_hook_before_a_step_may_replace_its_arguments(case):
    run, seen = Run(case), []
    closure = run.closure(0)
    run.opt.register_step_pre_hook(lambda opt, args, kwargs: ((opt, closure), {}))
    run.opt.register_step_post_hook(lambda opt, args, kwargs: seen.append((args, kwargs)))
    assert run.opt.step(None) is not None
    assert seen == [((run.opt, closure), {})]


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
