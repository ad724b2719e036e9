"""Native passes: equal to the plain ones, element by element, and used where they can be."""

import ctypes
import math
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stormplus import StormPlus
from stormplus.torch.core import kernels

pytestmark = pytest.mark.skipif(
    kernels.NATIVE is None and not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler, so no native passes",
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(300, 301), (7,), (1,), (), (0,), (40, 3, 5), (32768,), (32769,)]


def test_they_were_built():
    assert kernels.NATIVE is not None, "a compiler is there: run make, or pip install -e ."


def bundle(dtype, gradients=True, shapes=SHAPES, **options):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = StormPlus(params, **options)
    opt.estimate()
    for p in params:
        p.grad = torch.randn_like(p) if gradients else None
    (found,) = opt._roster().bundles()
    return opt, found


OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"maximize": True, "weight_decay": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["bare", "L2", "decoupled", "maximize"])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_each_pass_equals_the_plain_one_to_one_rounding(dtype, gradients, options):
    results = []
    for way in (kernels.NATIVE, kernels.PLAIN):
        _, tensors = bundle(dtype, gradients, **options)
        out = torch.zeros(2, dtype=torch.float64)
        coefficient = torch.tensor(0.37, dtype=torch.float64)
        way.move(tensors, coefficient)
        way.estimate(tensors, coefficient, out, first=False, guard=True)
        results.append(([(i.x, i.buffers[0]) for i in tensors.items], out))
    (ours, sums), (theirs, expected) = results
    # One rounding of x (of the parameter's dtype) or of d, which the second pass may double.
    for (x, d), (x_plain, d_plain) in zip(ours, theirs, strict=True):
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(x, x_plain, rtol=rounding, atol=rounding)
        own = max(4 * torch.finfo(d.dtype).eps, rounding * options.get("weight_decay", 0))
        torch.testing.assert_close(d, d_plain, rtol=own, atol=own)
    close = 1e-12 if not options and dtype == torch.float64 else 1e-5
    torch.testing.assert_close(sums, expected, rtol=close, atol=0)
    own = torch.stack([d.double().square().sum() for _, d in ours]).sum()
    torch.testing.assert_close(sums[1], own, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_norms_are_those_of_float64(dtype):
    _, tensors = bundle(dtype)
    out = torch.zeros(2, dtype=torch.float64)
    kernels.NATIVE.estimate(
        tensors, torch.zeros((), dtype=torch.float64), out, first=True, guard=True
    )
    exact = sum(i.g.double().square().sum() for i in tensors.items)
    torch.testing.assert_close(out, torch.stack([exact, exact]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_half_precision_number_comes_and_goes_as_torch_has_it(dtype):
    # x <- x - alpha d with d = 0 reads every number of 16 bits and writes it; with d = -x it is
    # doubled, which rounds and overflows.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for factor in (0.0, 0.1, 1.0, 3.0):
        p = nn.Parameter(every.clone())
        p.grad = torch.zeros_like(p)
        opt = StormPlus([p], check_finite=False)
        opt.estimate()
        (tensors,) = opt._roster().bundles()
        wide = torch.nan_to_num(every.float(), 0, 0, 0)
        tensors.items[0].buffers[0].copy_(wide)
        kernels.NATIVE.move(tensors, torch.tensor(-factor, dtype=torch.float64))
        expected = (every.float() + wide * factor).to(dtype)
        assert torch.equal(p.detach().nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_probe_finds_one_number_among_many(dtype, value):
    _, tensors = bundle(dtype)
    assert kernels.NATIVE.probe(tensors) == 0
    tensors.items[0].g.view(-1)[70_000] = value
    assert math.isnan(kernels.NATIVE.probe(tensors))


def test_an_estimator_of_another_dtype_goes_the_plain_way():
    p = nn.Parameter(torch.randn(5))
    p.grad = torch.randn(5)
    opt = StormPlus([p])
    opt.estimate()
    opt.state[p]["estimator"] = opt.state[p]["estimator"].bfloat16()
    before, d = p.detach().clone(), opt.state[p]["estimator"].float()
    opt.move()
    moved = before - opt.diagnostics()["step_size"] * d
    torch.testing.assert_close(p.detach(), moved, rtol=1e-2, atol=1e-2)


def test_the_largest_numbers_are_finite():
    _, tensors = bundle(torch.float32, shapes=[(5,)])
    tensors.items[0].g.fill_(torch.finfo(torch.float32).max)
    out = torch.zeros(2, dtype=torch.float64)
    assert kernels.NATIVE.probe(tensors) == 0
    kernels.NATIVE.estimate(tensors, out[0].clone(), out, first=True, guard=True)
    assert torch.isfinite(out).all()


def test_results_do_not_depend_on_the_number_of_threads():
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            _, tensors = bundle(torch.float32)
            out = torch.zeros(2, dtype=torch.float64)
            keep = torch.tensor(0.3, dtype=torch.float64)
            kernels.NATIVE.estimate(tensors, keep, out, first=False, guard=True)
            found.append((out, [i.buffers[0] for i in tensors.items]))
    finally:
        torch.set_num_threads(before)
    for out, estimators in found[1:]:
        assert torch.equal(out, found[0][0])
        assert all(map(torch.equal, estimators, found[0][1]))


def test_who_uses_them():
    def chosen(params, **options):
        for p in params:
            p.grad = torch.randn_like(p)
        opt = StormPlus(params, **options)
        opt.estimate()
        return [type(kernels.kernels_for(b)).__name__ for b in opt._roster().bundles()]

    assert chosen([nn.Parameter(torch.ones(3))]) == ["Native"]
    assert chosen([nn.Parameter(torch.ones(3))], foreach=False) == ["Plain"]
    assert chosen([nn.Parameter(torch.ones(3))], foreach=True) == ["Foreach"]
    assert chosen([nn.Parameter(torch.ones(3, dtype=torch.complex64))]) == ["Native"]
    with FlopCounterMode(display=False):
        assert chosen([nn.Parameter(torch.ones(3))]) == ["Plain"]  # somebody looks on


def test_layouts_that_differ_go_the_plain_way_and_autograd_sees_the_move():
    p = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    q = nn.Parameter(torch.randn(6, 4))
    opt, twin = StormPlus([p, q], lr=0.1), [p.detach().clone(), q.detach().clone()]
    for _ in range(3):
        p.grad, q.grad = torch.ones(4, 3, 5, 5), torch.ones(4, 6).t()
        if opt.started:
            versions = p._version, q._version
            opt.move()
            assert p._version > versions[0]
            assert q._version > versions[1]
        opt.estimate()
    for x, start in zip((p, q), twin):
        moved = (start - x.detach()).unique()
        assert moved.max() - moved.min() < 1e-6  # every coordinate has made the same way
        assert moved.min() > 0


def test_without_the_library_the_plain_passes_do_it(tmp_path):
    assert kernels.load_native(tmp_path) is None
    (tmp_path / "_native.so").write_text("not a library")
    assert kernels.load_native(tmp_path) is None
    code = (
        "import torch\nfrom stormplus.torch.core import kernels\nkernels.NATIVE = None\n"
        "from stormplus import StormPlus\np = torch.nn.Parameter(torch.ones(3))\n"
        "p.grad = torch.ones(3)\nopt = StormPlus([p])\nopt.estimate()\nopt.move()\nopt.estimate()\n"
        "assert p[0] < 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_memory_is_an_error_before_anything_is_used(monkeypatch):
    class Failing:
        def __getitem__(self, name):
            return lambda *arguments: -1

    _, tensors = bundle(torch.float32)
    library: ctypes.CDLL = Failing()
    with pytest.raises(MemoryError, match="no memory"):
        kernels.Native(library).move(tensors, torch.ones((), dtype=torch.float64))
