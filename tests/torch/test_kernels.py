"""The backends: each equals `plain`, is accurate, and needs little memory."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BF16,
    F16,
    F32,
    F64,
    KINDS,
    UNTUNED_KINDS,
    Kind,
    assert_tensors_agree,
    each_objective,
    estimated,
    group_of,
    moved,
    shard,
    untuned,
)
from optimizers import PATHS, assert_same, every, halves, made, state_tensors, values
from torch import nn

from stormplus import StormPlus, Untuned
from stormplus.torch.kernels import multi_tensor, native, plain

needs_native = pytest.mark.skipif(native.LIBRARY is None, reason="the library was not built")
MULTI_TENSOR = pytest.param(multi_tensor, id="multi_tensor")
NATIVE = pytest.param(native, id="native", marks=needs_native)
each_backend = pytest.mark.parametrize("backend", [MULTI_TENSOR, NATIVE])
each_path = pytest.mark.parametrize("path", PATHS)

# -- each function of a backend against the one of `plain` ---------------------------------------


def on_each_backend(kinds):
    """Run a test on all kinds with all backends that support them."""
    return pytest.mark.parametrize(
        ("backend", "kind"),
        [
            pytest.param(
                backend,
                kind,
                id=f"{backend.__name__.split('.')[-1]}, {name}",
            )
            for backend in (multi_tensor, *([native] if native.LIBRARY else []))
            for name, kind in kinds.items()
            if backend is multi_tensor or kind.native
        ],
    )


@on_each_backend(KINDS)
def test_move_equals_the_plain_one(backend, kind):
    actual, expected = (moved(b, kind.pair())[0] for b in (backend, plain))
    assert_tensors_agree(actual, expected)


@each_backend
@each_objective
def test_move_has_the_options_of_the_plain_one(backend, options):
    lists = Kind(BF16).pair()
    actual, expected = (moved(b, lists, **options)[0] for b in (backend, plain))
    assert_tensors_agree(actual, expected)


@on_each_backend(KINDS)
def test_estimate_equals_the_plain_one(backend, kind):
    (actual, sums), (expected, their_sums) = (estimated(b, kind.pair()) for b in (backend, plain))
    assert_tensors_agree(actual, expected)
    assert sums == pytest.approx(their_sums, rel=1e-6)


@each_backend
@pytest.mark.parametrize("first", [True, False])
@each_objective
def test_estimate_has_the_options_of_the_plain_one(backend, options, first):
    lists = Kind(BF16).pair()
    actual, expected = (estimated(b, lists, first, **options)[0] for b in (backend, plain))
    assert_tensors_agree(actual, expected)


@each_backend
@pytest.mark.parametrize("finite_only", [True, False])
@pytest.mark.parametrize(("dtype", "value"), [(F32, math.nan), (F16, -math.inf)], ids=str)
def test_estimate_leaves_out_what_is_not_finite(backend, dtype, value, finite_only):
    lists = Kind(dtype).pair()
    lists["grads"][-1][3, 3] = value
    found = [estimated(b, lists, finite_only=finite_only) for b in (backend, plain)]
    assert_tensors_agree(found[0][0], found[1][0])
    assert not math.isfinite(found[0][1][0])  # |g|^2 shows it


@on_each_backend(UNTUNED_KINDS)
def test_untuned_step_equals_the_plain_one(backend, kind):
    (actual, sums), (expected, their_sums) = (untuned(b, kind.untuned()) for b in (backend, plain))
    assert_tensors_agree(actual, expected)
    np.testing.assert_allclose(sums, their_sums, rtol=1e-5)


@each_backend
def test_untuned_step_on_parts_of_larger_tensors(backend):
    (actual, sums), (expected, their_sums) = (untuned(b, shard()) for b in (backend, plain))
    assert_tensors_agree(actual, expected)
    np.testing.assert_allclose(sums, their_sums, rtol=1e-5)


@pytest.mark.parametrize("backend", [pytest.param(plain, id="plain"), MULTI_TENSOR, NATIVE])
def test_a_sample_without_a_stride_is_not_measured(backend):
    _, (_, moved_sq) = untuned(backend, shard(sample_stride=0))
    assert moved_sq.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("run", [moved, estimated, untuned])
def test_several_slabs_equal_one(monkeypatch, run):
    lists = Kind().untuned() if run is untuned else Kind().pair()
    whole = run(multi_tensor, lists)
    monkeypatch.setattr(multi_tensor, "_CPU_SLAB", 1030)
    parts = run(multi_tensor, lists)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


each_pass = pytest.mark.parametrize(
    ("run", "lists"),
    [
        pytest.param(moved, Kind().pair(), id="move"),
        pytest.param(moved, Kind(BF16).pair(), id="move, bfloat16"),
        pytest.param(estimated, Kind().pair(), id="estimate"),
        pytest.param(untuned, Kind().untuned(), id="untuned_step"),
        pytest.param(untuned, Kind(BF16).untuned(), id="untuned_step, bfloat16"),
        pytest.param(untuned, Kind(state_dtype=BF16).untuned(), id="untuned_step, bfloat16 state"),
    ],
)
each_that_skips = pytest.mark.parametrize(
    "backend", [pytest.param(plain, id="plain"), MULTI_TENSOR]
)


@each_that_skips
@each_pass
def test_a_pass_that_is_skipped_changes_nothing(backend, run, lists):
    found, _ = run(backend, lists, skip=torch.tensor(True))
    assert_same(found, {name: lists[name] for name in found})


@pytest.mark.parametrize("backend", [pytest.param(plain, id="plain"), MULTI_TENSOR, NATIVE])
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("value", "expected"), [(math.nan, True), (-math.inf, True), ("largest", False)]
)
def test_any_nonfinite(backend, dtype, value, expected):
    grads = Kind(dtype).draw(0, dtype)
    grads[-1].view(-1)[-1] = torch.finfo(dtype).max if value == "largest" else value
    lists = dict.fromkeys(("params", "grads", "estimators"), grads)
    assert bool(backend.any_nonfinite(group_of(backend, lists))) == expected


# -- whole runs ----------------------------------------------------------------------------------

# Larger than a chunk, of several sizes, and one without elements.
SHAPES = [(700, 1000), (40, 30, 30), (64,), (1,), (), (33, 7), (0,)]


def run(path, steps=3, dtype=F32, shapes=SHAPES, **options):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    opt = StormPlus(params, lr=0.3, **PATHS[path], **options)

    def evaluate():
        for p in params:
            p.grad = torch.sin(p.detach()) + 0.1 * torch.randn_like(p)

    for _ in range(steps):
        halves(opt, evaluate)
    return params, opt


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(F32, {}, id="float32"),
        pytest.param(F32, {"weight_decay": 0.1, "maximize": True}, id="L2, maximize"),
        pytest.param(F32, {"weight_decay": 0.1, "decoupled_weight_decay": True}, id="decoupled"),
        pytest.param(F64, {}, id="float64"),
        pytest.param(BF16, {"weight_decay": 0.1}, id="bfloat16"),
    ],
)
@pytest.mark.parametrize("path", ["foreach", "native"])
def test_paths_agree_on_large_tensors(path, dtype, options):
    # A handful of roundings a step, seen through steps of order one; bf16 may fall on the other
    # side of a rounding of 2^-8.
    (expected, a), (actual, b) = (run(way, dtype=dtype, **options) for way in ("plain", path))
    tolerance = {F32: 1e-5, F64: 1e-12, BF16: 2**-7}[dtype]
    found = [[p, opt.state[p]["estimator"]] for ps, opt in ((actual, b), (expected, a)) for p in ps]
    half = len(found) // 2
    torch.testing.assert_close(found[:half], found[half:], rtol=tolerance, atol=tolerance)
    assert b.diagnostics() == pytest.approx(a.diagnostics(), rel=max(1e-6, tolerance / 10))


@every
def test_state_keeps_its_addresses(case):
    problem, params, opt = made(case, samples=2)
    case.train(problem, opt, params)
    before = state_tensors(opt)  # alive, so that their memory is not used for others
    case.train(problem, opt, params)
    moved = [k for k, t in state_tensors(opt).items() if t.data_ptr() != before[k].data_ptr()]
    assert moved == []


@each_path
def test_autograd_sees_that_parameters_have_moved(path):
    p = nn.Parameter(torch.ones(3))
    opt = StormPlus([p], **PATHS[path])
    p.grad = torch.ones(3)
    opt.estimate()
    stale = (p * p).sum()
    opt.move()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


# -- squared norms -------------------------------------------------------------------------------


@each_path
@pytest.mark.parametrize("size", [2_000_000, pytest.param(10**8, marks=pytest.mark.long)])
def test_squared_norms_of_many_elements(path, size):
    # torch.linalg.vector_norm(x)**2 in float32 is 2% low at 1e8
    torch.manual_seed(0)
    p, g = nn.Parameter(torch.zeros(size)), torch.randn(size)
    exact = sum(float(np.dot(c, c)) for c in (b.numpy().astype(np.float64) for b in g.split(10**6)))
    opt = StormPlus([p], lr=0.0, **PATHS[path])
    p.grad = g
    opt.estimate()
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(exact, rel=1e-12)
    p.grad = torch.zeros_like(g)
    opt.move()
    opt.estimate()
    scale = 1 - (1 + exact) ** (-2 / 3)
    assert opt.diagnostics()["estimator_norm"] ** 2 == pytest.approx(scale**2 * exact, rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(list(PATHS)),
    st.lists(st.sampled_from([0.0, 1e-38, 1e-20, 1.0, -3.0, 1e10, 1e20, 3e38]), min_size=1),
)
def test_squared_norms_of_any_range(path, numbers):
    x = torch.tensor(numbers, dtype=F32)
    opt = StormPlus([nn.Parameter(x)], **PATHS[path])
    opt.parameters()[0].grad = x
    opt.estimate()
    exact = float(np.square(x.double().numpy()).sum())
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(exact, rel=1e-14)


@each_path
def test_a_large_gradient_may_have_other_strides(path):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(900, 700))
    p.grad = torch.randn(700, 900).t()
    opt = StormPlus([p], **PATHS[path])
    opt.estimate()
    assert torch.equal(opt.state[p]["estimator"], p.grad)
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(float(p.grad.double().square().sum()))


# -- temporaries ---------------------------------------------------------------------------------


# -- torch.compile -------------------------------------------------------------------------------


# torch warns about itself when any optimizer's closure returns a loss inside torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_pair_inside_the_users_torch_compile():
    """The optimizer itself stays outside the graph; the result is that of the plain call."""
    ends = []
    for wrap in (lambda step: step, torch.compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
        opt = StormPlus(model.parameters(), lr=0.3)
        x, calls = torch.randn(32, 20), []

        def closure():
            calls.append(None)
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        step = wrap(opt.step)
        for _ in range(4):
            step(closure)
        assert len(calls) == 7
        ends.append(values(model.parameters()))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


def untuned_run(wrap, **options):
    """Return the parameters after four steps with given gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(20, 30), (30,), (1, 30)]]
    opt = Untuned(params, **options)
    step = wrap(opt.step)
    for _ in range(4):
        for p in params:
            p.grad = torch.randn_like(p)
        step()
    return values(params)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("aot_eager", {}, id="aot_eager"),
        pytest.param("inductor", {}, id="inductor", marks=pytest.mark.long),
        pytest.param(
            "inductor", {"state_dtype": BF16}, id="inductor, bfloat16 state", marks=pytest.mark.long
        ),
    ],
)
def test_untuned_compiled_equals_eager(backend, options):
    torch._dynamo.reset()
    compiled = untuned_run(
        lambda step: torch.compile(step, fullgraph=True, backend=backend), **options
    )
    tolerance = 1e-2 if options else 1e-5
    eager = untuned_run(lambda step: step, **options)
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)


def test_importing_the_optimizers_does_not_import_the_compiler():
    code = "import stormplus.torch, sys; print('torch._dynamo' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
