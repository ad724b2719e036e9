"""The contract of step, move and estimate: calls, order, hooks, schedulers, errors."""

import warnings

import pytest
import torch
from problems_for_tests import backward, made

from stormplus import SimplifiedStormPlus, Storm, StormPlus

CLASSES = [StormPlus, SimplifiedStormPlus, Storm]


@pytest.mark.parametrize("cls", CLASSES)
def test_closure_is_called_once_then_twice(cls):
    problem, params, opt = made(cls)
    counts = []
    for xi in problem.samples:
        calls = []
        opt.step(problem.closure(opt, params, xi, calls))
        counts.append(len(calls))
    assert counts == [1] + [2] * 9
    assert opt.diagnostics()["grad_evaluations"] == 19
    assert opt.diagnostics()["step"] == 10


def test_step_returns_the_loss_of_the_first_evaluation():
    problem, params, opt = made(StormPlus)
    for xi in problem.samples[:5]:
        with torch.no_grad():
            before = problem.loss(params, xi)
        assert torch.equal(opt.step(problem.closure(opt, params, xi)), before)


def test_step_works_under_no_grad():
    problem, params, opt = made(StormPlus)
    with torch.no_grad():
        problem.run(opt, params)
    assert opt.diagnostics()["step"] == 10


@pytest.mark.parametrize("cls", CLASSES)
def test_missing_closure_shows_the_lines_to_write(cls):
    _, _, opt = made(cls)
    with pytest.raises(TypeError) as caught:
        opt.step()
    for part in (cls.__name__, "def closure():", "loss.backward()", "opt.step(closure)"):
        assert part in str(caught.value)


def test_wrong_order_raises_and_changes_nothing():
    problem, params, opt = made(StormPlus)
    xi = problem.samples[0]
    backward(problem, opt, params, xi)
    with pytest.raises(RuntimeError, match=r"opt.started is False\) call only estimate"):
        opt.move()
    opt.estimate()
    with pytest.raises(RuntimeError, match="estimate\\(\\) comes after move"):
        opt.estimate()
    opt.move()
    with pytest.raises(RuntimeError, match="evaluate the same sample again and call estimate"):
        opt.move()
    assert opt.pending
    backward(problem, opt, params, xi)
    opt.estimate()
    assert opt.started
    assert not opt.pending


# -- the pending pair ----------------------------------------------------------------------


class Boom(Exception):
    pass


def failing(closure, when):
    calls = []

    def wrapped():
        calls.append(None)
        if len(calls) == when:
            raise Boom
        return closure()

    return wrapped


def test_closure_that_raises_first_leaves_everything_as_it_was():
    problem, params, opt = made(StormPlus)
    twin_params = problem.parameters()
    twin = StormPlus(twin_params)
    for i, xi in enumerate(problem.samples):
        closure = problem.closure(opt, params, xi)
        if i in (0, 4):
            with pytest.raises(Boom):
                opt.step(failing(closure, when=1))
        opt.step(closure)
        twin.step(problem.closure(twin, twin_params, xi))
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params))


def test_closure_that_raises_second_leaves_a_pending_pair_that_estimate_completes():
    problem, params, opt = made(StormPlus)
    twin_params = problem.parameters()
    twin = StormPlus(twin_params)
    for i, xi in enumerate(problem.samples):
        closure = problem.closure(opt, params, xi)
        if i == 4:
            with pytest.raises(Boom):
                opt.step(failing(closure, when=2))
            assert opt.pending
            closure()
            opt.estimate()
        else:
            opt.step(closure)
        twin.step(problem.closure(twin, twin_params, xi))
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params))
    assert opt.diagnostics() == twin.diagnostics()


def test_step_after_a_lost_pair_restarts_with_one_evaluation_and_keeps_the_sums():
    problem, params, opt = made(StormPlus)
    problem.run(opt, params, problem.samples[:4])
    with pytest.raises(Boom):
        opt.step(failing(problem.closure(opt, params, problem.samples[4]), when=2))
    before, where = opt.diagnostics(), [p.detach().clone() for p in params]
    calls = []
    opt.step(problem.closure(opt, params, problem.samples[5], calls))
    assert len(calls) == 1
    assert all(torch.equal(p, w) for p, w in zip(params, where))  # a restart does not move
    for p in params:
        assert torch.equal(opt.state[p]["estimator"], p.grad)  # d <- g
    after = opt.diagnostics()
    assert after["sum_g_sq"] == pytest.approx(before["sum_g_sq"] + after["grad_norm"] ** 2)
    assert after["step"] == before["step"] + 1
    opt.step(problem.closure(opt, params, problem.samples[6], calls))
    assert len(calls) == 3


def test_restart_at_will():
    problem, params, opt = made(StormPlus)
    problem.run(opt, params, problem.samples[:3])
    opt.restart()
    assert not opt.started
    calls = []
    opt.step(problem.closure(opt, params, problem.samples[3], calls))
    assert len(calls) == 1
    assert all(torch.equal(opt.state[p]["estimator"], p.grad) for p in params)


# -- hooks and schedulers --------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
def test_step_hooks_fire_once_a_pair(by_hand):
    problem, params, opt = made(StormPlus, samples=5)
    fired = []
    opt.register_step_pre_hook(lambda *_: fired.append("pre"))
    opt.register_step_post_hook(lambda *_: fired.append("post"))
    for xi in problem.samples:
        if not by_hand:
            opt.step(problem.closure(opt, params, xi))
            continue
        if opt.started:
            backward(problem, opt, params, xi)
            opt.move()
        backward(problem, opt, params, xi)
        opt.estimate()
    assert fired == ["pre", "post"] * 5


SCHEDULERS = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2),
    "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
    "OneCycleLR": lambda opt: torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=1.0, total_steps=20, cycle_momentum=False
    ),
    "CyclicLR": lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.1, 1.0, cycle_momentum=False),
    "ExponentialLR": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
    "LinearLR": torch.optim.lr_scheduler.LinearLR,
    "WarmRestarts": lambda opt: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
    "SequentialLR": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.ConstantLR(opt),
            torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
        ],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_and_no_false_warning(name, by_hand):
    problem, params, opt = made(StormPlus, samples=8)
    schedule = SCHEDULERS[name](opt)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for xi in problem.samples:
            rates.append(float(opt.param_groups[0]["lr"]))
            if by_hand:
                if opt.started:
                    backward(problem, opt, params, xi)
                    opt.move()
                backward(problem, opt, params, xi)
                opt.estimate()
            else:
                opt.step(problem.closure(opt, params, xi))
            schedule.step()
    assert len(set(rates)) > 1


def test_reduce_on_plateau():
    problem, params, opt = made(StormPlus)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    problem.run(opt, params)
    for _ in range(3):
        schedule.step(1.0)
    assert opt.param_groups[0]["lr"] < 1.0


def test_one_cycle_needs_cycle_momentum_false():
    # torch refuses it: the gain is not a momentum that a scheduler may set
    _, _, opt = made(StormPlus)
    with pytest.raises(ValueError, match="momentum"):
        torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=20)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_that_computes_nothing_the_second_time_is_refused(set_to_none):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    opt = StormPlus(model.parameters())
    x, calls = torch.randn(5, 3), 0

    def closure(idle=False):
        nonlocal calls
        calls += 1
        if idle:
            return None
        opt.zero_grad(set_to_none=set_to_none)
        loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    opt.step(closure)
    calls = 0
    with pytest.raises(RuntimeError, match="has not computed a gradient"):
        opt.step(lambda: closure(idle=calls > 0))
    assert calls == 2
    assert opt.pending  # as after any second evaluation that fails
    opt.step(closure)
    assert not opt.pending


def test_gradients_that_accumulate_count_as_computed():
    w = torch.nn.Parameter(torch.ones(2))
    unused = torch.nn.Parameter(torch.ones(2))
    unused.grad = torch.zeros(2)
    opt = StormPlus([unused, w])

    def closure():  # never zeroes: wrong for other reasons, but not for this one
        loss = (w**2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert opt.diagnostics()["grad_evaluations"] == 5
