"""Autocast, and a loss scale that overflows in either evaluation."""

import pytest
import torch
from torch import nn

from stormplus import StormPlus, same_sample, scaled_step
from tests.torch.optimizers import halves

N = 12
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 16, 6, generator=DATA), torch.randn(N, 16, 1, generator=DATA)


class Run:
    """A training run that can be made to overflow in given calls (sample, number of the call)."""

    def __init__(self, overflow=(), autocast=None, **scaler):
        torch.manual_seed(0)
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
        self.model = nn.Sequential(*layers)
        self.opt = StormPlus(self.model.parameters(), lr=0.3)
        scaler = {"init_scale": 2.0**10, "growth_interval": 1000} | scaler
        self.scaler = torch.amp.GradScaler("cpu", **scaler)
        self.overflow, self.autocast, self.calls = overflow, autocast, []

    def closure(self, i):
        def evaluate():
            call = (i, sum(k == i for k, _ in self.calls))
            self.calls.append(call)
            self.opt.zero_grad()
            with torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None):
                out = self.model(X[i])
            loss = nn.functional.smooth_l1_loss(out.float(), Y[i])
            self.scaler.scale(loss).backward()
            if call in self.overflow:
                self.model[0].weight.grad[0, 0] = float("inf")
            return loss

        return evaluate

    def step(self, i, **options):
        return scaled_step(self.opt, self.scaler, self.closure(i), self.model, **options)

    def scaled(self, samples=range(N)):
        for i in samples:
            self.step(i)
        return self

    def plain(self, skip=()):
        """The run that `scaled_step` is compared with."""
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        for i in range(N):
            if i not in skip:
                self.opt.step(same_sample(self.opt, self.model)(self.closure(i)))
        return self


def assert_same(run, expected):
    found, expected = run.model.state_dict(), expected.model.state_dict()  # statistics too
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("take", [StormPlus.step, halves])
def test_a_step_inside_an_autocast_region_sees_the_new_weights(take):
    # Autocast caches the weights that it has cast. Without noise d is the gradient where we are.
    run = Run(autocast=torch.bfloat16, enabled=False)
    closure, params = run.closure(0), list(run.model.parameters())
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            take(run.opt, closure)
        closure()
        found = [run.opt.state[p]["estimator"] for p in params]
        torch.testing.assert_close(found, [p.grad for p in params], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("overflow", "skip", "scale"),
    [
        ((), (), 1.0),  # a disabled scaler
        ((), (), 2.0**10),  # the scale is a power of two: unscaled gradients are exact
        ([(5, 0)], [5], 2.0**9),  # the sample is dropped before anything has moved
        ([(0, 0)], [0], 2.0**9),
        ([(5, 1), (5, 2), (7, 1)], (), 2.0**7),  # the move is kept, and it is tried again
    ],
    ids=["disabled", "none", "first", "very first", "second"],
)
def test_overflow_costs_a_sample_or_an_evaluation_and_nothing_else(overflow, skip, scale):
    run, expected = Run(overflow, enabled=scale > 1).scaled(), Run().plain(skip)
    assert_same(run, expected)
    assert run.opt.diagnostics() == expected.opt.diagnostics()
    assert run.scaler.get_scale() == scale
    assert len(run.calls) == 2 * (N - len(skip)) - 1 + len(overflow)


def test_it_gives_up_after_twenty_overflows():
    run = Run(overflow=[(3, k) for k in range(1, 30)]).scaled(range(3))
    before = run.opt.diagnostics()
    with pytest.raises(FloatingPointError, match="overflowed 20 times"):
        run.step(3)
    assert len([call for call in run.calls if call[0] == 3]) == 21
    assert run.opt.pending
    assert run.opt.diagnostics()["sum_g_sq"] == before["sum_g_sq"]
    run.step(4)  # restarts: one evaluation
    assert len([call for call in run.calls if call[0] == 4]) == 1
    assert torch.isfinite(run.model[0].weight).all()


def test_unscaled_and_finite_gradients_can_be_clipped():
    run, norms = Run(overflow=[(1, 0), (2, 1)]), []

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
    run = Run(overflow=[(1, 0), (1, 1)]).scaled([0])
    run.scaler = torch.amp.GradScaler("cpu", init_scale=1e-45)
    run.step(1)  # halved, the smallest number is zero
    assert run.scaler.get_scale() == 0
    run.step(1)
    assert run.opt.diagnostics()["step"] == 1
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_the_scalers_own_step_says_what_to_do_instead():
    run = Run()
    closure = run.closure(0)
    for _ in range(2):
        closure()
        with pytest.raises(RuntimeError, match="scaled_step"):
            run.scaler.step(run.opt, closure)
        run.scaler.update()
    closure()
    with pytest.raises(TypeError, match="scaled_step"):
        run.scaler.step(run.opt)
    assert not run.opt.started
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.step(run.opt, closure)  # as opt.step(closure)
    assert run.opt.started
