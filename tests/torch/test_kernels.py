"""The three ways of running a pass, compiled for real here: equal, accurate, lean."""

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import PATHS, halves
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stormplus import StormPlus
from stormplus.torch.core import compiled
from stormplus.torch.core.kernels import CHUNK, split

# Larger than a chunk, of several sizes that are joined, and what has no elements.
SHAPES = [(700, 1000), (40, 30, 30), (64,), (1,), (), (33, 7), (0,)]
each_path = pytest.mark.parametrize("path", PATHS)


def run(path, steps=3, dtype=torch.float32, shapes=SHAPES, **options):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    opt = StormPlus(params, lr=0.3, **PATHS[path], **options)

    def evaluate():
        for p in params:
            p.grad = torch.sin(p.detach()) + 0.1 * torch.randn_like(p)

    for _ in range(steps):
        halves(opt, evaluate)
    return params, opt


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"weight_decay": 0.1, "scope": "tensor", "maximize": True}),
        (torch.float32, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (torch.float64, {}),
        (torch.bfloat16, {"weight_decay": 0.1}),
    ],
    ids=["float32", "L2", "decoupled", "float64", "bfloat16"],
)
@pytest.mark.parametrize("path", ["foreach", "fused"])
def test_paths_agree_on_large_tensors(path, dtype, options):
    # A handful of roundings a step, seen through steps of order one; bf16 may fall on the other
    # side of a rounding of 2^-8.
    (plain, a), (other, b) = (run(way, dtype=dtype, **options) for way in ("plain", path))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-7}[dtype]
    for p, q in zip(plain, other):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            a.state[p]["estimator"], b.state[q]["estimator"], rtol=tolerance, atol=tolerance
        )
    for name, value in a.diagnostics().items():
        assert b.diagnostics()[name] == pytest.approx(value, rel=max(1e-6, tolerance / 10))


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
@given(st.lists(st.sampled_from([0.0, 1e-38, 1e-20, 1.0, -3.0, 1e10, 1e20, 3e38]), min_size=1))
def test_squared_norms_of_any_range(numbers):
    x = torch.tensor(numbers, dtype=torch.float32)
    opt = StormPlus([nn.Parameter(x)])
    opt.parameters()[0].grad = x
    opt.estimate()
    exact = float(np.square(x.double().numpy()).sum())
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4)], ids=str)
def test_pieces_of_any_shape_and_stride(shape):
    x = torch.randn(shape)
    for view in (x, x.t() if x.dim() == 2 else x, x.expand(2, *shape)):
        seen = torch.cat([piece.reshape(-1) for (piece,) in split(4, view)])
        assert sorted(seen.tolist()) == sorted(view.reshape(-1).tolist())


def test_large_tensors_whose_strides_differ_go_row_by_row():
    torch.manual_seed(0)
    p, g = nn.Parameter(torch.randn(900, 700)), torch.randn(700, 900).t()
    assert p.numel() > CHUNK
    other = nn.Parameter(torch.zeros(1))  # some parameter must have a gradient
    opt = StormPlus([p, other])
    p.grad = g
    assert p.grad.stride() != p.stride()
    opt.estimate()
    assert torch.equal(opt.state[p]["estimator"], g)
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(float(g.double().square().sum()))
    p.grad, keep = None, 1 - opt.diagnostics()["gain"]
    other.grad = torch.ones(1)
    opt.move()
    opt.estimate()  # a missing gradient goes by chunks too
    torch.testing.assert_close(opt.state[p]["estimator"], keep * g)


# -- temporaries ---------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Bytes of temporaries that live at once, as the dispatcher sees them."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.large = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in self._tensors(args)} | self.seen
        for t in self._tensors(out):
            storage = t.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
            if t._base is None and key not in known and size:
                self.seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                self.large += size >= 1 << 20
                weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key, size):
        self.live -= size
        self.seen.discard(key)

    @staticmethod
    def _tensors(tree):
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"check_finite": False}], ids=["", "L2", "unchecked"]
)
@pytest.mark.parametrize("path", ["plain", "foreach"])
def test_temporaries_stay_below_the_largest_tensor(path, options):
    params, opt = run(path, steps=2, shapes=[(512, 512, 3, 3), *SHAPES], **options)
    largest = max(p.nbytes for p in params)
    gc.collect()
    for half in (opt.move, opt.estimate):
        with Peak() as peak:
            half()
        assert 0 < peak.peak <= largest, f"{half.__name__}: {peak.peak / largest:.2f} x largest"


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True, "dtype": torch.bfloat16},
     {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    ids=["", "L2", "half", "decoupled"],
)  # fmt: skip
def test_the_plain_passes_take_room_for_their_temporaries_once(options):
    def taken(tensors):
        _, opt = run("plain", steps=2, shapes=[(600, 512)] * tensors, **options)
        gc.collect()
        with Peak() as peak:
            opt.move()
            opt.estimate()
        return peak.large

    # A result of each tensor's size, freed and taken again, leaves holes in the CPU's memory.
    assert taken(2) == taken(6) <= 4


# -- compiled kernels ----------------------------------------------------------------------------


def sorted_out(opt):
    (bundle,) = opt._roster().bundles()
    return compiled._sort(bundle)


def test_small_tensors_are_joined_in_bounded_portions():
    params = [nn.Parameter(torch.randn(30_000)) for _ in range(40)]
    opt = StormPlus(params, fused=True)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.estimate()
    sizes = [flat.size for flat in sorted_out(opt)[0]]
    assert sum(sizes) == 40 * 30_000
    assert max(sizes) <= compiled.SMALL


def test_channels_last_is_taken_as_it_is():
    p = nn.Parameter(torch.randn(64, 64, 5, 5).to(memory_format=torch.channels_last))
    opt = StormPlus([p], fused=True)
    p.grad = torch.sin(p.detach())
    opt.estimate()
    flats, rest = sorted_out(opt)
    assert [flat.size for flat in flats] == [p.numel()]
    assert rest.items == []  # nothing is left for the plain path


def test_the_kernels_give_way_to_a_dispatch_mode_and_come_back():
    p = nn.Parameter(torch.randn(100_000))
    opt = StormPlus([p], fused=True)
    p.grad = torch.ones_like(p)
    opt.estimate()
    with FlopCounterMode(display=False):
        opt.move()
        opt.estimate()
    opt.move()
    opt.estimate()
    assert opt.diagnostics()["step"] == 3


def test_the_kernels_compile_once_whatever_the_shapes_and_numbers():
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    run("fused", weight_decay=0.1)
    params, opt = run("fused")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 4  # probe, move, and estimate with and without weight decay
    opt.param_groups[0].update(lr=0.123, weight_decay=0.01)
    more = [nn.Parameter(torch.randn(shape)) for shape in [(77, 1000), (123457,), (5,)]]
    opt.add_param_group({"params": more, "lr": 0.5, "maximize": True})

    def evaluate():
        for p in (*params, *more):
            p.grad = torch.randn_like(p)

    for _ in range(3):
        halves(opt, evaluate)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_fused_moves_are_seen_by_autograd():
    # A backward pass through a parameter that has moved meanwhile must not go unnoticed.
    p = nn.Parameter(torch.ones(3))
    opt = StormPlus([p], fused=True)
    p.grad = torch.ones(3)
    opt.estimate()
    stale = (p * p).sum()
    opt.move()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_an_error_that_is_not_the_compilers_is_passed_on(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(torch, "compile", lambda kernel, **_: kernel)
    with pytest.raises(ZeroDivisionError):
        compiled._compiled.__wrapped__(broken)()


# torch warns about itself when any optimizer's closure returns a loss inside torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_inside_the_users_torch_compile():
    # The optimizer itself stays outside the graph; the result is that of the plain call.
    ends = []
    for wrap in (lambda step: step, torch.compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
        opt = StormPlus(model.parameters(), lr=0.3, fused=True)
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
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_fused_without_a_compiler_says_so_before_anything_moved(tmp_path):
    code = (
        "import torch\n"
        "from stormplus import StormPlus\n"
        "p = torch.nn.Parameter(torch.ones(3))\n"
        "opt = StormPlus([p], fused=True)\n"
        "p.grad = torch.ones(3)\n"
        "opt.estimate()\n"
        "try:\n"
        "    opt.move()\n"
        "except RuntimeError as error:\n"
        "    print(error, p.tolist(), opt.pending)\n"
    )
    environment = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert "install a C++ compiler" in out.stdout, out.stderr
    assert "[1.0, 1.0, 1.0] False" in out.stdout


def test_importing_the_optimizers_does_not_import_the_compiler():
    code = "import stormplus.torch, sys; print('torch._dynamo' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
