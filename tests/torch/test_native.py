"""The native backend beyond test_kernels.py: its arithmetic, its threads, and when it is used."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from optimizers import assert_same, halves, values
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stormplus import StormPlus, Untuned
from stormplus.torch._sharding import Sample
from stormplus.torch._tensors import TensorGroup
from stormplus.torch.kernels import choose_kernels, native, plain
from stormplus.torch.kernels.plain import UntunedCoefficients

pytestmark = pytest.mark.skipif(
    native.LIBRARY is None and not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler, so no native passes",
)

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SHAPES = [(300, 301), (7,), (1,), (), (40, 3, 5), (32768,), (32769,)]
each_dtype = pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)


def test_the_library_was_built():
    assert native.LIBRARY is not None, "a compiler is there: run make, or pip install -e ."


def group_of(**lists):
    return TensorGroup({}, native, torch.device("cpu"), **lists)


def random_pair(dtype=F32):
    torch.manual_seed(0)
    params = [torch.randn(shape).to(dtype) for shape in SHAPES]
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    wide = F64 if dtype == F64 else F32
    estimators = [torch.randn(shape, dtype=wide) for shape in SHAPES]
    return group_of(params=params, grads=grads, estimators=estimators)


# -- numbers -------------------------------------------------------------------------------------


@each_dtype
def test_norms_are_those_of_float64(dtype):
    group = random_pair(dtype)
    sums = native.estimate(group, 0.0, first=True, finite_only=True)
    exact = sum(float(g.double().square().sum()) for g in group.grads)
    assert sums == pytest.approx((exact, exact), rel=1e-12)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 3.0])
def test_every_half_precision_number_is_read_and_written_as_torch_does(dtype, factor):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = torch.nan_to_num(every.float(), 0, 0, 0)
    group = group_of(
        params=[every.clone()], grads=[torch.zeros_like(every)], estimators=[finite.clone()]
    )
    native.move(group, -factor)
    expected = (every.float() + finite * factor).to(dtype)
    assert torch.equal(group.params[0].nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 32767, 32768, 50_000, 70_000, 90_299])
@each_dtype
def test_one_number_that_is_not_finite_is_found_among_many(dtype, place, value):
    group = random_pair(dtype)
    group.grads[0].view(-1)[place] = value
    assert native.any_nonfinite(group)


def test_the_norm_of_the_largest_numbers_is_finite():
    largest = torch.full((5,), torch.finfo(F32).max)
    group = group_of(params=[torch.ones(5)], grads=[largest], estimators=[torch.zeros(5)])
    assert np.isfinite(native.estimate(group, 0.0, first=True, finite_only=True)).all()


def scaled_run(scale):
    """Train a float64 model of two tensors on a loss that is multiplied by `scale`."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 4, dtype=F64))
    bias = nn.Parameter(torch.zeros(5, dtype=F64))
    inputs, targets = torch.randn(12, 4, dtype=F64), torch.randn(12, 5, dtype=F64)
    opt = Untuned([weight, bias])
    for _ in range(20):
        opt.zero_grad()
        loss = scale * (inputs @ weight.T + bias - targets).square().mean()
        loss.backward()
        opt.step()
    return values([weight, bias])


@pytest.mark.parametrize("scale", [2.0**600, 2.0**-600], ids=["2^600", "2^-600"])
@pytest.mark.parametrize("library", ["native", "plain"])
def test_untuned_trains_alike_on_a_loss_of_any_scale(scale, library, monkeypatch):
    expected = scaled_run(1.0)
    if library == "plain":
        monkeypatch.setattr(native, "LIBRARY", None)
    torch.testing.assert_close(scaled_run(scale), expected, rtol=1e-12, atol=0)


# -- threads and memory --------------------------------------------------------------------------


@pytest.fixture
def threads():
    """Give the function that sets the number of threads, and restore it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [2, 5])
def test_an_estimate_does_not_depend_on_the_number_of_threads(threads, count):
    found = []
    for n in (1, count):
        threads(n)
        group = random_pair()
        sums = native.estimate(group, 0.3, first=False, finite_only=True)
        found.append((list(sums), group.estimators))
    assert_same(*found)


@pytest.mark.parametrize("count", [2, 5])
def test_a_step_of_untuned_does_not_depend_on_the_number_of_threads(threads, count):
    found = []
    for n in (1, count):
        threads(n)
        torch.manual_seed(0)
        drawn = [[torch.randn(shape) for shape in SHAPES] for _ in range(4)]
        names = ("params", "grads", "z_minus_x", "grad_rms")
        samples = [Sample(p) for p in drawn[0]]
        starts = [torch.zeros(sample.count) for sample in samples]
        lists = dict(zip(names, drawn)) | {"samples": samples, "initial_sample": starts}
        numbers = UntunedCoefficients(*[np.full(len(SHAPES), 0.1)] * 7)
        sums = native.untuned_step(group_of(**lists), numbers)
        found.append((np.array(sums).tolist(), drawn))
    assert_same(*found)


def test_no_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", SimpleNamespace(stormplus_move=lambda by: -1))
    with pytest.raises(MemoryError):
        native.move(random_pair(), 0.1)


# -- when it is used -----------------------------------------------------------------------------


X = torch.zeros(3, 2)
CHANNELS_LAST = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
CHOICES = {
    "contiguous": ([X, X, X], None, native),
    "channels last": ([CHANNELS_LAST] * 3, None, native),
    "foreach=False": ([X, X, X], False, plain),
    "foreach=True": ([X, X, X], True, plain),
    "gradient with other strides": ([X, torch.zeros(2, 3).t(), X], None, plain),
    "gradient with another dtype": ([X, X.double(), X], None, plain),
    "state with another dtype": ([X, X, X.double()], None, plain),
    "bfloat16 state": ([X, X, X.bfloat16()], None, native),
    "bfloat16": ([X.bfloat16(), X.bfloat16(), X], None, native),
    "no elements": ([X[:0]] * 3, None, plain),
}


@pytest.mark.parametrize("case", CHOICES)
def test_which_backend_is_chosen(case):
    tensors, foreach, backend = CHOICES[case]
    assert choose_kernels(tensors, foreach) is backend


def test_the_plain_backend_is_chosen_under_a_dispatch_mode():
    with FlopCounterMode(display=False):
        assert choose_kernels([X, X, X], None) is plain


def test_the_plain_backend_is_chosen_without_the_library(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", None)
    assert choose_kernels([X, X, X], None) is plain


def test_a_run_goes_on_under_a_dispatch_mode_and_after_it():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = StormPlus([p])
    halves(opt, lambda: None)
    with FlopCounterMode(display=False):
        halves(opt, lambda: None)
    halves(opt, lambda: None)
    assert opt.diagnostics()["step"] == 3


@pytest.mark.parametrize("make", [StormPlus, Untuned])
def test_a_gradient_with_other_strides_moves_as_one_with_the_same(make):
    torch.manual_seed(0)
    shape, ends = (4, 3, 5, 5), []
    x, gradients = torch.randn(shape), torch.randn(3, *shape)
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(x.clone())
        opt = make([p])
        for g in gradients:
            p.grad = g.to(memory_format=layout)
            if isinstance(opt, StormPlus):
                halves(opt, lambda: None)
            else:
                opt.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends)


def test_a_missing_library_is_none(tmp_path):
    assert native.load_library(tmp_path) is None


def test_a_broken_library_is_none(tmp_path):
    (tmp_path / "_native.so").write_text("not a library")
    assert native.load_library(tmp_path) is None
