"""The three ways of running a pass: equal on real sizes, lean, compiled once."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stormplus import StormPlus
from stormplus.torch import fused
from stormplus.torch.work import gather

PATHS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SHAPES = [(512, 512, 3, 3), (700, 1000), (64,), (1,), (), (33, 7), (0,)]


def run(path, steps=4, **options):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    opt = StormPlus(params, **PATHS[path], **options)
    for _ in range(steps):
        for half in (opt.move, opt.estimate) if opt.started else (opt.estimate,):
            for p in params:
                p.grad = torch.sin(p.detach()) + 0.1 * torch.randn_like(p)
            half()
    return params, opt


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"scope": "tensor"}])
@pytest.mark.parametrize("path", ["foreach", "fused"])
def test_paths_agree_on_millions_of_elements(path, options):
    # float32: a handful of roundings a step, seen through steps of order one
    (plain, a), (other, b) = run("plain", **options), run(path, **options)
    for p, q in zip(plain, other):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            a.state[p]["estimator"], b.state[q]["estimator"], rtol=1e-5, atol=1e-5
        )
    for name, value in a.diagnostics().items():
        assert b.diagnostics()[name] == pytest.approx(value, rel=1e-6)


class Peak(TorchDispatchMode):
    """Bytes of temporaries that live at once, as the dispatcher sees them."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor) and t._base is None:
                storage = t.untyped_storage()
                key = storage.data_ptr()
                known = {a.untyped_storage().data_ptr() for a in _tensors(args)}
                if key not in known and key not in self.seen and storage.nbytes():
                    self.seen.add(key)
                    self._track(storage, key)
        return out

    def _track(self, storage, key):
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone():
            self.live -= size
            self.seen.discard(key)

        weakref.finalize(storage, gone)


def _tensors(args):
    for a in args:
        if isinstance(a, torch.Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _tensors(a)


def test_fused_joins_small_tensors_in_bounded_portions():
    params = [nn.Parameter(torch.randn(30_000)) for _ in range(40)]
    opt = StormPlus(params, fused=True)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.estimate()
    batches = gather(opt.param_groups, opt.state, opt._home, opt._options).known.values()
    sizes = [flat.size for batch in batches for flat in fused._split(batch)[0]]
    assert sum(sizes) == 40 * 30_000
    assert max(sizes) <= fused.SMALL


def test_fused_takes_channels_last_as_it_is():
    p = nn.Parameter(torch.randn(64, 64, 5, 5).to(memory_format=torch.channels_last))
    twin = nn.Parameter(p.detach().clone())
    runs = []
    for q, options in ((p, {"fused": True}), (twin, {})):
        opt = StormPlus([q], lr=0.1, **options)
        for _ in range(3):
            for half in (opt.move, opt.estimate) if opt.started else (opt.estimate,):
                q.grad = torch.sin(q.detach())
                half()
        runs.append(q)
        batch = next(
            iter(gather(opt.param_groups, opt.state, opt._home, opt._options).known.values())
        )
        assert fused._split(batch)[1].xs == []  # nothing is left for the plain path
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def test_fused_gives_way_to_a_dispatch_mode_and_comes_back():
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


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"check_finite": False}])
@pytest.mark.parametrize("path", ["plain", "foreach"])
def test_temporaries_stay_below_the_largest_tensor(path, options):
    params, opt = run(path, steps=2, **options)
    largest = max(p.numel() * p.element_size() for p in params)
    gc.collect()
    for half in (opt.move, opt.estimate):
        with Peak() as peak:
            half()
        assert 0 < peak.peak <= largest, f"{half.__name__}: {peak.peak / largest:.2f} x largest"


def test_fused_kernels_compile_once_whatever_the_shapes_and_numbers():
    torch._dynamo.reset()
    fused._compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    run("fused", steps=3, weight_decay=0.1)
    params, opt = run("fused", steps=3)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled == 4  # probe, move, and estimate with and without weight decay
    for group in opt.param_groups:
        group.update(lr=0.123, weight_decay=0.01)
    more = [nn.Parameter(torch.randn(shape)) for shape in [(77, 1000), (123457,), (5,)]]
    opt.add_param_group({"params": more, "lr": 0.5, "maximize": True})
    for _ in range(3):
        for half in (opt.move, opt.estimate):
            for p in (*params, *more):
                p.grad = torch.randn_like(p)
            half()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


# torch warns about itself when any optimizer's closure returns a loss inside torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_inside_the_users_torch_compile(options):
    # The optimizer itself stays outside the graph; the result is that of the plain call.
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 1))
        opt = StormPlus(model.parameters(), lr=0.3, **options)
        x = torch.randn(32, 20)
        calls = []

        def closure():
            calls.append(None)
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        step = torch.compile(opt.step) if compiled else opt.step
        for _ in range(4):
            step(closure)
        assert len(calls) == 7
        runs.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*runs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


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
