"""The backends: each pass equals that of `plain`, and norms are accurate."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stormplus import StormPlus
from stormplus.torch import _sharding
from stormplus.torch.kernels import multi_tensor, native, plain, triton
from tests.support.kernel_cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    Case,
    Kind,
    assert_tensors_agree,
    cases,
    copied,
    estimated,
    group_of,
    in_memory_order,
    moved,
    untuned,
)
from tests.torch.optimizers import PATHS, assert_same

pytestmark = pytest.mark.usefixtures("interpreter")  # of Triton
BACKENDS = {
    plain: (),
    multi_tensor: (),
    native: (pytest.mark.skipif(native.LIBRARY is None, reason="the library was not built"),),
    triton: (
        pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
        pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, about overflow and NaN
    ),
}
FAST = [multi_tensor, native, triton]


def each_backend(backends, cases=None):
    """Run a test on all backends, with all cases that they support."""
    params = []
    for backend in backends:
        short, marks = backend.__name__.split(".")[-1], BACKENDS[backend]
        if cases is None:
            params.append(pytest.param(backend, id=short, marks=marks))
            continue
        for name, case in cases.items():
            if not isinstance(case, Case) or backend not in case.kind.without:
                params.append(pytest.param(backend, case, id=f"{short}, {name}", marks=marks))
    return pytest.mark.parametrize("backend" if cases is None else ("backend", "case"), params)


@each_backend(FAST, cases())
def test_a_pass_equals_the_plain_one(backend, case):
    lists = case.lists()
    actual, actual_sums = case.run(backend, lists, **case.options)
    expected, expected_sums = case.run(plain, lists, **case.options)
    assert_tensors_agree(actual, expected, exact=backend is triton and case.run is not untuned)
    rtol = 1e-5 if case.run is untuned and backend is not triton else 1e-6
    np.testing.assert_allclose(actual_sums, expected_sums, rtol=rtol)


@each_backend(FAST, {"1e-38": 1e-38, "1e38": 1e38})
def test_untuned_step_with_gradients_at_the_ends_of_float32(backend, case):
    lists = Kind(shapes=((1025,),), scale=case).untuned()
    (actual, _), (expected, _) = (untuned(b, lists) for b in (backend, plain))
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-6)
    torch.testing.assert_close(actual["grad_rms"], expected["grad_rms"], rtol=3e-6, atol=3e-45)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "gaps"])
def test_every_kth_coordinate_is_sampled_whatever_the_layout(layout, monkeypatch):
    monkeypatch.setattr(_sharding, "sample_stride", lambda size: 7)
    x = LAYOUTS[layout](torch.randn(4, 3, 5, 5)).transpose(0, 1)
    sampled = _sharding.SampledCoordinates.of(x)
    found = torch.empty(sampled.count)
    sampled.store(in_memory_order(x), found, ())
    assert torch.equal(found, x.reshape(-1)[::7])
    assert (sampled.index.diff() > 0).all()


@each_backend([plain, *FAST])
def test_stochastic_rounding_keeps_nan_of_any_bits(backend):
    lists = Kind(shapes=((5,),), state_dtype=BF16).untuned()
    lists["grads"][0].view(torch.int32)[2] = 0x7FFFFFFF  # CUDA's
    found, _ = untuned(backend, lists)
    assert found["z_minus_x"][0][2].isnan()
    assert found["grad_rms"][0][2].isnan()


@each_backend([plain, *FAST])
def test_displacement_is_not_finite_if_a_parameter_overflows_and_its_master_does_not(backend):
    lists = Kind(F16, shapes=((8,),)).untuned()
    for name in ("params", "masters"):
        lists[name][0][2] = 65504.0
    lists["z_minus_x"][0][2] = 1e4
    found, (_, displacement_sq) = untuned(backend, lists)
    assert found["params"][0][2] == math.inf
    assert found["masters"][0].isfinite().all()
    assert not math.isfinite(displacement_sq[0])


@pytest.mark.parametrize("run", [moved, estimated, untuned])
def test_several_slabs_equal_one(monkeypatch, run):
    lists = Case(run, Kind(), {}).lists()
    whole = run(multi_tensor, lists)
    monkeypatch.setattr(multi_tensor, "_SLAB", 1030)
    torch.testing.assert_close(run(multi_tensor, lists), whole, rtol=1e-12, atol=0)


PASSES = {
    "move": Case(moved, Kind(), {}),
    "move, bfloat16": Case(moved, Kind(BF16), {}),
    "estimate": Case(estimated, Kind(), {}),
    "untuned_step": Case(untuned, Kind(), {}),
    "untuned_step, bfloat16": Case(untuned, Kind(BF16), {}),
    "untuned_step, bfloat16 state": Case(untuned, Kind(state_dtype=BF16), {}),
}


@each_backend([plain, multi_tensor, triton], PASSES)  # skipping is for devices
def test_a_pass_that_is_skipped_changes_nothing(backend, case):
    lists = case.lists()
    found, _ = case.run(backend, lists, skip=torch.tensor(True))
    assert_same(found, {name: lists[name] for name in found})


@each_backend([plain, *FAST])
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("value", "expected"), [(math.nan, True), (-math.inf, True), ("largest", False)]
)
def test_any_nonfinite(backend, dtype, value, expected):
    if backend is triton and dtype == F64:
        return
    for place in (0, 32767, 32768, -1):  # around the end of a chunk of native
        grads = Kind(dtype).draw(0, dtype)
        grads[-1].view(-1)[place] = torch.finfo(dtype).max if value == "largest" else value
        lists = dict.fromkeys(("params", "grads", "estimators"), grads)
        assert bool(backend.any_nonfinite(group_of(backend, lists))) == expected


@each_backend([plain, *FAST])
@pytest.mark.parametrize("run", [moved, untuned])
def test_autograd_sees_the_writes(backend, run):
    found, _ = run(backend, Case(run, Kind(), {}).lists())
    assert all(x._version > copied(x)._version for x in found["params"])


# -- inside an optimizer --------------------------------------------------------------------------

each_path = pytest.mark.parametrize("path", PATHS)


@each_path
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2_000_000, F32), (90_001, F64), (90_001, BF16), (90_001, F16),
        pytest.param(10**8, F32, marks=pytest.mark.long),
    ],
    ids=str,
)  # fmt: skip
def test_squared_norms_of_many_elements(path, size, dtype):
    # torch.linalg.vector_norm(x)**2 in float32 is 2% low at 1e8
    torch.manual_seed(0)
    p, g = nn.Parameter(torch.zeros(size, dtype=dtype)), torch.randn(size).to(dtype)
    blocks = (block.double().numpy() for block in g.split(10**6))
    exact = sum(float(np.dot(block, block)) for block in blocks)
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
