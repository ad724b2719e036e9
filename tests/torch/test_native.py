"""The native backend beyond test_kernels.py: its arithmetic, its threads, and when it is used."""

import shutil
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stormplus import StormPlus
from stormplus.torch.kernels import choose_kernels, native, plain
from tests.support.kernel_cases import BF16, F16, F32, F64, Case, Kind, estimated, group_of, untuned
from tests.torch.optimizers import assert_same, every, halves, noise

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
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (2, 40, 30, 30)], ids=["small", "large"])
def test_all_dense_layouts_take_the_same_steps_as_the_plain_passes(case, shape, monkeypatch):
    x, gradients = noise(*shape), noise(3, *shape, seed=1)
    library, layouts, ends = native.LIBRARY, [torch.contiguous_format, torch.channels_last], []
    for backend, layout, grad_layout in product([plain, native], layouts, layouts):
        monkeypatch.setattr(native, "LIBRARY", library if backend is native else None)
        p = nn.Parameter(x.clone(memory_format=layout))
        opt = case([p])
        case.descend(opt, [p], [[g.to(memory_format=grad_layout)] for g in gradients])
        assert opt._infos[0].kernels is (plain if case.path else backend)
        ends.append(p.detach())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0])


@pytest.mark.parametrize("content", [None, "not a library"], ids=["missing", "broken"])
def test_a_library_that_cannot_be_loaded_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "_native.so").write_text(content)
    assert native.load_library(tmp_path) is None
