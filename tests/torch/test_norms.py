"""Squared norms: accurate at any size and scale."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stormplus import StormPlus
from stormplus.torch.norms import blocks, square_norm

PATHS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("path", PATHS)
def test_100_million_elements_to_1e_6(path):
    # torch.linalg.vector_norm(x)**2 in float32 is 2% low here
    torch.manual_seed(0)
    p = nn.Parameter(torch.empty(10**8))
    g = torch.randn(10**8)
    exact = sum(float(np.dot(c, c)) for c in (b.numpy().astype(np.float64) for b in g.split(10**7)))
    opt = StormPlus([p], **PATHS[path])
    p.grad = g
    opt.estimate()
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(exact, rel=1e-6)
    p.grad = torch.zeros_like(g)
    nn.init.zeros_(p)
    opt.move()
    opt.estimate()
    scale = 1 - (1 + exact) ** (-2 / 3)
    assert opt.diagnostics()["estimator_norm"] ** 2 == pytest.approx(scale**2 * exact, rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-20, 1.0, -3.0, 1e10, 1e20, 3e38]), max_size=40),
    st.integers(1, 7),
)
def test_blocks_add_up_to_the_whole(values, limit):
    x = torch.tensor(values, dtype=torch.float32)
    exact = float(np.square(x.double().numpy()).sum())
    total = sum(float(square_norm(block)) for (block,) in blocks(limit, x))
    assert total == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 5), (2, 3, 4)])
def test_blocks_of_any_shape_and_stride(shape):
    x = torch.randn(shape)
    for view in {x, x.t() if x.dim() == 2 else x, x.expand(2, *shape)}:
        if view.numel() == 0:
            continue
        seen = torch.cat([block.reshape(-1) for (block,) in blocks(4, view)])
        assert sorted(seen.tolist()) == sorted(view.reshape(-1).tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_squares_do_not_overflow(dtype):
    p = nn.Parameter(torch.zeros(1000, dtype=dtype))
    opt = StormPlus([p])
    p.grad = torch.full_like(p, 60000.0)
    opt.estimate()
    value = float(torch.tensor(60000.0, dtype=dtype))
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(1000 * value**2, rel=1e-12)
