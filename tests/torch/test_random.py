"""Both evaluations of a step see the same random numbers."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, minimize, same_sample, verify_closure

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def loss_of(w, mask_of):
    return F.smooth_l1_loss(mask_of(torch.tanh(X @ w[0])) @ w[1], Y)


def start():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(6, 8)), rng.normal(size=8)]


def dropout(h):
    return F.dropout(h, 0.5)


def test_dropout_equals_the_reference_with_the_masks_fixed():
    # The reference draws one mask a sample, by seed, and evaluates both gradients with it.
    def gradient(blocks, seed):
        w = [torch.tensor(b, requires_grad=True) for b in blocks]
        torch.manual_seed(seed)
        return [g.numpy() for g in torch.autograd.grad(loss_of(w, dropout), w)]

    seeds = iter(range(30))
    expected = minimize(gradient, start(), lambda rng: next(seeds), 30)

    w = [nn.Parameter(torch.tensor(b)) for b in start()]
    opt = StormPlus(w)

    def closure():
        opt.zero_grad()
        loss = loss_of(w, dropout)
        loss.backward()
        return loss

    for seed in range(30):
        torch.manual_seed(seed)
        opt.step(closure)
    for p, block in zip(w, expected.x):
        np.testing.assert_allclose(p.detach().numpy(), block, rtol=1e-10, atol=1e-13)


def recording_step(**options):
    """Two steps of a model that writes down what it draws."""
    p = nn.Parameter(torch.ones(3))
    opt, drawn = StormPlus([p], **options), []

    def closure():
        opt.zero_grad()
        drawn.append(torch.rand(2))
        loss = (p * p).sum()
        loss.backward()
        return loss

    torch.manual_seed(0)
    opt.step(closure)
    opt.step(closure)
    return drawn


def test_stream_goes_on_from_the_second_evaluation():
    drawn = recording_step()
    assert torch.equal(drawn[1], drawn[2])
    torch.manual_seed(0)
    assert torch.equal(drawn[0], torch.rand(2))
    assert torch.equal(drawn[1], torch.rand(2))
    after = torch.rand(2)
    recording_step()
    assert torch.equal(torch.rand(2), after)


def test_replay_can_be_turned_off():
    drawn = recording_step(replay_rng=False)
    assert not torch.equal(drawn[1], drawn[2])


def noisy(generator, **options):
    p = nn.Parameter(torch.ones(4))
    opt = StormPlus([("weight", p)], **options)

    def closure():
        opt.zero_grad()
        loss = (p * torch.rand(4, generator=generator)).sum()
        loss.backward()
        return loss

    return p, opt, closure


def test_generators_of_the_users_own():
    generator = torch.Generator().manual_seed(5)
    p, opt, closure = noisy(generator, replay_rng=[generator])
    opt.step(closure)
    opt.step(closure)
    # d = g + (1 - a)(d - g~): with the same numbers in both, the sum of |g|^2 is that of the
    # first and second draws of the generator.
    fresh = torch.Generator().manual_seed(5)
    expected = sum(float(torch.rand(4, generator=fresh).double().square().sum()) for _ in range(2))
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(expected)


def test_naming_no_generator_is_the_default():
    drawn = recording_step(replay_rng=[])
    assert torch.equal(drawn[1], drawn[2])


def test_copy_replays_the_users_generator():
    generator = torch.Generator().manual_seed(5)
    p, opt, _ = noisy(generator, replay_rng=[generator])
    assert copy.deepcopy(opt)._options.generators == (generator,)
    assert p is opt.param_groups[0]["params"][0]


# -- a pair left pending ----------------------------------------------------------------------


class Dropper:
    """Counts and records the random numbers of each evaluation; fails when told to."""

    def __init__(self):
        self.p = nn.Parameter(torch.ones(2))
        self.opt = StormPlus([self.p])
        self.drawn, self.fail_at = [], None

    def __call__(self):
        self.opt.zero_grad()
        self.drawn.append(torch.rand(1).item())
        if len(self.drawn) == self.fail_at:
            raise ZeroDivisionError
        loss = (self.p * self.p).sum()
        loss.backward()
        return loss


def lost_pair():
    torch.manual_seed(0)
    run = Dropper()
    run.opt.step(run)
    run.fail_at = 3
    with pytest.raises(ZeroDivisionError):
        run.opt.step(run)
    assert run.opt.pending
    return run


@pytest.mark.parametrize("saved", [False, True])
def test_pending_pair_of_a_step_is_completed_with_its_own_random_numbers(saved):
    run = lost_pair()
    if saved:  # through a checkpoint, in a process whose streams stand elsewhere
        state, new = run.opt.state_dict(), Dropper()
        new.opt.load_state_dict(state)
        new.drawn, run = list(run.drawn), new
        torch.manual_seed(99)
    torch.rand(7)
    with same_sample(run.opt):
        run()
        run.opt.estimate()
    assert run.drawn[3] == run.drawn[1]


def test_step_that_gives_a_pair_up_does_not_rewind_the_stream():
    run = lost_pair()
    before = torch.get_rng_state()
    fresh = torch.rand(1).item()
    torch.set_rng_state(before)
    with same_sample(run.opt):
        run.opt.step(run)  # restarts
    assert run.drawn[3] == fresh


# -- verify_closure ----------------------------------------------------------------------------


def test_verify_accepts_a_good_closure_and_leaves_no_trace():
    w = [nn.Parameter(torch.tensor(b)) for b in start()]
    opt = StormPlus(w)
    w[0].grad = torch.full_like(w[0], 7.0)
    before, weights = torch.get_rng_state(), [p.detach().clone() for p in w]

    def closure():
        opt.zero_grad()
        loss = loss_of(w, dropout)
        loss.backward()
        return loss

    verify_closure(opt, closure)
    assert torch.equal(torch.get_rng_state(), before)
    assert (w[0].grad == 7).all()
    assert w[1].grad is None
    assert all(torch.equal(p, q) for p, q in zip(w, weights))
    assert not opt.started


def test_verify_names_the_parameter_of_an_unreplayed_generator():
    generator = torch.Generator()
    _, opt, closure = noisy(generator)
    with pytest.raises(RuntimeError, match=r"'weight'\) gradients that differ.*replay_rng=\["):
        verify_closure(opt, closure)
    _, opt, closure = noisy(generator, replay_rng=[generator])
    verify_closure(opt, closure)


def test_verify_finds_a_fresh_batch_in_the_closure():
    model = nn.Linear(3, 1)
    opt = StormPlus(model.named_parameters())
    batches = iter(torch.randn(10, 4, 3))

    def closure():
        opt.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"'weight'\).*Draw the batch outside"):
        verify_closure(opt, closure)


def test_verify_finds_a_stateful_loss():
    p, calls = nn.Parameter(torch.ones(2)), []
    opt = StormPlus([p])

    def closure():
        opt.zero_grad()
        calls.append(None)
        loss = len(calls) * (p * p).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="parameter 0 of group 0"):
        verify_closure(opt, closure)


def test_verify_finds_gradients_that_are_not_zeroed():
    p = nn.Parameter(torch.ones(2))
    opt = StormPlus([p])

    def closure():
        loss = (p * p).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="does not zero the gradients"):
        verify_closure(opt, closure)


def test_verify_finds_a_missing_backward():
    p = nn.Parameter(torch.ones(2))
    opt = StormPlus([p])
    with pytest.raises(RuntimeError, match="left no gradient"):
        verify_closure(opt, lambda: (p * p).sum())


def test_verify_is_not_fooled_by_half_precision():
    # the norm of 1000 elements of 1e4 is not an fp16 number
    p, calls = nn.Parameter(torch.ones(1000, dtype=torch.float16)), []
    opt = StormPlus([p])

    def closure():
        opt.zero_grad()
        calls.append(None)
        loss = (1e4 * len(calls) * p).sum(dtype=torch.float32)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="gradients that differ"):
        verify_closure(opt, closure)


def test_verify_names_a_gradient_that_is_not_finite():
    p = nn.Parameter(torch.zeros(2))
    opt = StormPlus([("p", p)])

    def closure():
        opt.zero_grad()
        loss = p.sqrt().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="'p'\\) is not finite at the present point"):
        verify_closure(opt, closure)


def test_verify_finds_a_parameter_used_only_once():
    p, q, calls = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    opt = StormPlus([p, q])

    def closure():
        opt.zero_grad()
        calls.append(None)
        loss = (p * p).sum() + (q.sum() if len(calls) == 1 else 0)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="only one of two evaluations gave parameter 1"):
        verify_closure(opt, closure)
