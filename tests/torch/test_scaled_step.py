"""bf16 autocast, and fp16 with a loss scale that overflows in either evaluation."""

from contextlib import nullcontext

import pytest
import torch
from optimizers import halves
from torch import nn

from stormplus import StormPlus, same_sample, scaled_step

N = 12
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 16, 6, generator=DATA), torch.randn(N, 16, 1, generator=DATA)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def plain_run(skip=(), autocast=False):
    """The run that `scaled_step` is compared with."""
    model = network()
    opt = StormPlus(model.parameters(), lr=0.3)
    for i in range(N):

        def closure():
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                out = model(X[i])
            loss = nn.functional.smooth_l1_loss(out.float(), Y[i])
            loss.backward()
            return loss

        if i not in skip:
            opt.step(same_sample(opt, model)(closure))
    return model, opt


class Scaled:
    """A training run under `scaled_step` that can be made to overflow where it is told."""

    def __init__(self, overflow=(), dtype=torch.float16, autocast=False):
        self.model = network()
        self.opt = StormPlus(self.model.parameters(), lr=0.3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        self.overflow, self.calls = set(overflow), []
        self.dtype, self.autocast = dtype, autocast

    def step(self, i, **options):
        def closure():
            call = (i, sum(k == i for k, _ in self.calls))
            self.calls.append(call)
            self.opt.zero_grad()
            with torch.autocast("cpu", dtype=self.dtype, enabled=self.autocast):
                out = self.model(X[i])
            loss = nn.functional.smooth_l1_loss(out.float(), Y[i])
            self.scaler.scale(loss).backward()
            if call in self.overflow:
                self.model[0].weight.grad[0, 0] = float("inf")
            return loss

        return scaled_step(self.opt, self.scaler, closure, self.model, **options)

    def run(self):
        for i in range(N):
            self.step(i)
        return self


def same(model, expected, tolerance=0.0):
    for (name, a), b in zip(model.state_dict().items(), expected.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_follows_full_precision(dtype):
    run = Scaled(dtype=dtype, autocast=True).run()
    expected, _ = plain_run()
    # 11 moves with gradients good to 2^-8 (bf16) or 2^-11 (fp16)
    same(run.model, expected, 0.1 if dtype == torch.bfloat16 else 0.02)
    assert len(run.calls) == 2 * N - 1
    assert run.opt.state[run.model[0].weight]["estimator"].dtype == torch.float32
    if dtype == torch.bfloat16:  # which needs no scaling
        same(plain_run(autocast=True)[0], expected, 0.1)


@pytest.mark.parametrize("way", ["step", "closure", "context", "halves"])
def test_a_step_inside_an_autocast_region_sees_the_new_weights(way):
    # Autocast caches the weights that it has cast. Without noise d is the gradient where we are.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = StormPlus(model.parameters())

    def closure():
        opt.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(X[0]).float(), Y[0])
        loss.backward()
        return loss

    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if way == "step":
                opt.step(closure)
            elif way == "closure":
                opt.step(same_sample(opt, model)(closure))
            else:
                with same_sample(opt, model) if way == "context" else nullcontext():
                    halves(opt, closure)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            closure()
        g = torch.cat([p.grad.flatten() for p in model.parameters()])
        d = torch.cat([opt.state[p]["estimator"].flatten() for p in model.parameters()])
        torch.testing.assert_close(d, g, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("overflow", "skip", "scale"),
    [
        ((), (), 2.0**10),  # the scale is a power of two: unscaled gradients are exact
        ([(5, 0)], [5], 2.0**9),  # the sample is dropped before anything has moved
        ([(0, 0)], [0], 2.0**9),
        ([(5, 1), (5, 2), (7, 1)], (), 2.0**7),  # the move is kept, and it is tried again
    ],
    ids=["none", "first", "very first", "second"],
)
def test_overflow_costs_a_sample_or_an_evaluation_and_nothing_else(overflow, skip, scale):
    run = Scaled(overflow).run()
    expected, opt = plain_run(skip)
    same(run.model, expected)  # running statistics too
    assert run.opt.diagnostics() == opt.diagnostics()
    assert run.scaler.get_scale() == scale
    assert len(run.calls) == 2 * (N - len(skip)) - 1 + len(overflow)


def test_twenty_overflows_are_enough():
    run = Scaled(overflow=[(3, k) for k in range(1, 30)])
    for i in range(3):
        run.step(i)
    before = run.opt.diagnostics()
    with pytest.raises(FloatingPointError, match="overflowed 20 times, down to a scale of"):
        run.step(3)
    assert len([call for call in run.calls if call[0] == 3]) == 21
    assert run.opt.pending
    assert run.opt.diagnostics()["sum_g_sq"] == before["sum_g_sq"]
    run.step(4)  # restarts: one evaluation
    assert len([call for call in run.calls if call[0] == 4]) == 1
    assert torch.isfinite(run.model[0].weight).all()


def test_unscaled_and_finite_gradients_can_be_clipped():
    run, norms = Scaled(overflow=[(1, 0), (2, 1)]), []

    def clip():
        params = run.model.parameters()
        norms.append(nn.utils.clip_grad_norm_(params, 0.05, error_if_nonfinite=True).item())

    for i in range(5):
        run.step(i, process=clip)
    assert len(norms) == 7
    assert max(norms) < 10  # of the loss, not of the scaled loss
    assert run.opt.diagnostics()["grad_norm"] <= 0.05 * (1 + 1e-6)
    assert run.opt.diagnostics()["step"] == 4  # one sample was dropped


def test_a_scale_that_has_run_out_is_not_taken_for_finite():
    run = Scaled()
    run.step(0)
    run.overflow = {(1, k) for k in range(2)}
    run.scaler = torch.amp.GradScaler("cpu", init_scale=1e-45)
    run.step(1)  # halved, the smallest number is zero
    assert run.scaler.get_scale() == 0
    run.step(1)
    assert run.opt.diagnostics()["step"] == 1
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_hooks_fire_once_and_schedulers_do_not_warn():
    run, fired = Scaled(), []
    run.opt.register_step_post_hook(lambda *_: fired.append("post"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.opt, 0.9)
    for i in range(4):
        run.step(i)
        schedule.step()
    assert fired == ["post"] * 4


def test_a_disabled_scaler_is_the_plain_step():
    run = Scaled()
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    same(run.run().model, plain_run()[0])


def test_torch_refuses_its_own_line_and_ours_says_what_to_do():
    # The reason for scaled_step: scaler.step takes no closure, and without one we refuse.
    run = Scaled()
    run.step(0)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        run.scaler.step(run.opt, closure=lambda: None)
    run.scaler.scale(torch.ones((), requires_grad=True)).backward()
    with pytest.raises(TypeError, match="scaled_step"):
        run.scaler.step(run.opt)
