"""The native backend beyond test_kernels.py: its arithmetic, its threads, and when it is used."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_cases import BF16, F16, F32, F64, Case, Kind, estimated, group_of, untuned
from optimizers import assert_same, every, halves, noise
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stormplus import StormPlus
from stormplus.torch.kernels import choose_kernels, native, plain

pytestmark = pytest.mark.skipif(
    native.LIBRARY is None and not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler, so no native passes",
)
each_dtype = pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
# Chunks have 32,768 elements.
SHAPES = ((300, 301), (7,), (1,), (), (40, 3, 5), (32768,), (32769,))


def test_the_library_was_built():
    assert native.LIBRARY is not None, "a compiler is there: run make, or pip install -e ."


# -- numbers -------------------------------------------------------------------------------------


@each_dtype
def test_norms_are_those_of_float64(dtype):
    lists = Kind(dtype, shapes=SHAPES).pair()
    _, sums = estimated(native, lists, first=True)
    exact = sum(float(g.double().square().sum()) for g in lists["grads"])
    assert sums == pytest.approx([exact, exact], rel=1e-12)


def test_the_norm_of_the_largest_numbers_is_finite():
    lists = Kind(shapes=((5,),)).pair()
    lists["grads"] = [torch.full((5,), torch.finfo(F32).max)]
    assert np.isfinite(estimated(native, lists, first=True)[1]).all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 3.0])
def test_every_half_precision_number_is_read_and_written_as_torch_does(dtype, factor):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = torch.nan_to_num(every.float(), 0, 0, 0)
    lists = {"params": [every], "grads": [torch.zeros_like(every)], "estimators": [finite]}
    group = group_of(native, lists)
    native.move(group, -factor)
    expected = (every.float() + finite * factor).to(dtype)
    assert torch.equal(group.params[0].nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 32767, 32768, 50_000, 70_000, 90_299])
@each_dtype
def test_one_number_that_is_not_finite_is_found_among_many(dtype, place, value):
    lists = Kind(dtype, shapes=SHAPES).pair()
    lists["grads"][0].view(-1)[place] = value
    assert native.any_nonfinite(group_of(native, lists))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("run", [estimated, untuned])
def test_a_pass_does_not_depend_on_the_number_of_threads(run, count):
    before, found = torch.get_num_threads(), []
    lists = Case(run, Kind(shapes=SHAPES), {}).lists()
    try:
        for threads in (1, count):
            torch.set_num_threads(threads)
            tensors, sums = run(native, lists)
            found.append((tensors, np.array(sums).tolist()))
    finally:
        torch.set_num_threads(before)
    assert_same(*found)


def test_no_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", SimpleNamespace(stormplus_move=lambda by: -1))
    with pytest.raises(MemoryError):
        native.move(group_of(native, Kind().pair()), 0.1)


# -- when it is used -----------------------------------------------------------------------------

X = torch.zeros(3, 2)
CHOICES = {
    "contiguous": ([X, X, X], None, native),
    "foreach=False": ([X, X, X], False, plain),
    "foreach=True": ([X, X, X], True, plain),
    "gaps": ([torch.zeros(3, 4)[:, ::2], X, X], None, plain),
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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("grad_layout", [torch.contiguous_format, torch.channels_last])
def test_dense_tensors_of_any_layout_are_supported(layout, grad_layout):
    p = nn.Parameter(noise(2, 3, 4, 4).to(memory_format=layout))
    p.grad = torch.ones_like(p, memory_format=grad_layout)
    opt = StormPlus([p])
    opt.estimate()
    assert [info.kernels for info in opt._infos] == [native]


def test_the_plain_backend_is_chosen_without_the_library(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", None)
    assert choose_kernels([X, X, X], None) is plain


def test_a_run_goes_on_under_a_dispatch_mode_and_after_it():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = StormPlus([p])
    halves(opt, lambda: None)
    with FlopCounterMode(display=False):
        assert choose_kernels([X, X, X], None) is plain
        halves(opt, lambda: None)
    halves(opt, lambda: None)
    assert opt.diagnostics()["step"] == 3


@every
def test_a_gradient_with_other_strides_moves_as_one_with_the_same(case):
    x, gradients, ends = noise(4, 3, 5, 5), noise(3, 4, 3, 5, 5, seed=1), []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(x.clone())
        rows = [[g.to(memory_format=layout)] for g in gradients]
        case.descend(case([p]), [p], rows)
        ends.append(p.detach())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("content", [None, "not a library"], ids=["missing", "broken"])
def test_a_library_that_cannot_be_loaded_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "_native.so").write_text(content)
    assert native.load_library(tmp_path) is None
