"""verify_closure: what it accepts, and what it says of closures that are not one sample."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, verify_closure
from tests.torch.optimizers import assert_same

GENERATOR = torch.Generator()


class Closure:
    """`loss(run, call)` of two parameters, "weight" and "other"; `call` counts from 1."""

    def __init__(self, loss, p=None, zero=True, **options):
        self.p = nn.Parameter(torch.ones(4)) if p is None else p
        self.other = nn.Parameter(torch.ones(2))
        self.opt = StormPlus([("weight", self.p), ("other", self.other)], **options)
        self.loss, self.zero, self.calls = loss, zero, 0

    def __call__(self):
        self.calls += 1
        if self.zero:
            self.opt.zero_grad()
        loss = self.loss(self, self.calls)
        if loss is not None:
            loss.backward()
        return loss


def noisy(run, _):
    return (run.p * torch.rand(4, generator=GENERATOR)).sum()


GOOD = {
    "dropout": lambda: Closure(lambda run, _: F.dropout(run.p.square(), 0.5).sum()),
    "a named generator": lambda: Closure(noisy, replay_rng=[GENERATOR]),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_closure_is_accepted_and_leaves_no_trace(name):
    run = GOOD[name]()
    run.p.grad = torch.full_like(run.p, 7.0)
    before = torch.get_rng_state()
    verify_closure(run.opt, run)
    assert run.calls == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert (run.p.grad == 7).all()
    assert run.other.grad is None
    assert torch.equal(run.p, torch.ones(4))
    assert not run.opt.started


HALF = nn.Parameter(torch.ones(1000, dtype=torch.float16))  # 1e4 of these: no norm in fp16
BAD = {
    "a stateful loss": (
        Closure(lambda run, call: (call + 1) * run.p.sum()), r"'weight'\).*Draw the batch outside"
    ),
    "fp16": (
        Closure(lambda run, call: (1e4 * (1 + call) * run.p).sum(dtype=torch.float32), HALF),
        "gradients that differ",
    ),
    "a generator that is not named": (Closure(noisy), r"replay_rng=\["),
    "no replay": (
        Closure(lambda run, _: (run.p * torch.rand(4)).sum(), replay_rng=False),
        "gradients that differ",
    ),
    "not zeroed": (
        Closure(lambda run, _: run.p.square().sum(), zero=False), "must zero the gradients"
    ),
    "no backward": (Closure(lambda run, _: None), "left no gradient"),
    "not finite": (
        Closure(lambda run, _: run.p.sqrt().sum(), nn.Parameter(torch.zeros(2))), "not finite"
    ),
    "used once": (
        Closure(lambda run, call: (run.p.sum() + (run.other.sum() if call == 1 else 0))),
        r"parameter 1 of group 0 \('other'\) gradients that differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_closure_that_is_not_one_sample_is_refused(name):
    run, message = BAD[name]
    with pytest.raises(RuntimeError, match=message):
        verify_closure(run.opt, run)


def test_running_statistics_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    opt, x = StormPlus(model.parameters()), torch.randn(8, 3)
    before = copy.deepcopy(model.state_dict())

    def closure():
        opt.zero_grad()
        model(x).square().mean().backward()

    verify_closure(opt, closure, model)
    assert_same(model.state_dict(), before)
