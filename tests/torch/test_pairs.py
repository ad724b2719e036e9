"""What only the paired optimizers do: two gradients per sample, move and estimate."""

import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from stormplus import Storm, StormPlus, Untuned
from stormplus.torch import same_sample, scaled_step, verify_closure
from stormplus.torch.kernels import plain
from tests.torch.optimizers import (
    PLAIN,
    OwnRule,
    Run,
    assert_same,
    every_paired,
    every_path,
    halves,
    parameter,
    values,
    with_rule,
)


def given(opt, p, *rows):
    """Take steps with the gradients `rows` of one parameter; both of a pair are the same."""
    for row in rows:

        def evaluate(row=row):
            p.grad = torch.as_tensor(row, dtype=p.dtype).expand_as(p).clone()

        halves(opt, evaluate)


# -- the unit of the gradient --------------------------------------------------------------------


def test_the_unit_is_the_first_gradient_that_is_not_zero_with_weight_decay():
    p = parameter(0.0, 0.0)
    opt = StormPlus([p], unit="first", weight_decay=0.5)
    given(opt, p, 0.0, 0.0)
    assert opt.diagnostics()["unit"] == 1.0  # not known yet
    with torch.no_grad():
        p += 4.0
    given(opt, p, [1.0, 2.0])  # the objective's gradient is (3, 4)
    assert opt.diagnostics()["unit"] == pytest.approx(5.0)
    opt.restart()
    given(opt, p, 7.0)
    assert opt.diagnostics()["unit"] == pytest.approx(5.0)
    opt.reset()
    given(opt, p, 0.0)
    assert opt.diagnostics()["unit"] == pytest.approx(0.5 * float(p.detach().norm()))


# -- move and estimate ---------------------------------------------------------------------------


@every_paired
def test_the_halves_are_the_step(case):
    run, by_halves = Run(case, samples=8), Run(case, samples=8)
    schedules = [lr_scheduler.ExponentialLR(each.opt, 0.9) for each in (run, by_halves)]
    for i in range(8):
        run.opt.step(run.closure(i))
        halves(by_halves.opt, by_halves.closure(i))
        for schedule in schedules:
            schedule.step()  # without a warning
    assert_same(run.everything(), by_halves.everything())


def test_the_wrong_order_raises_and_changes_nothing():
    run = Run(PLAIN)
    run.closure(0)()
    with pytest.raises(RuntimeError, match="estimate"):
        run.opt.move()
    run.opt.estimate()
    with pytest.raises(RuntimeError, match="move"):
        run.opt.estimate()
    run.opt.move()
    before = run.everything()
    with pytest.raises(RuntimeError, match="estimate"):
        run.opt.move()
    assert_same(run.everything(), before)
    assert run.opt.pending
    run.opt.estimate()
    assert run.opt.started
    assert not run.opt.pending


@pytest.mark.parametrize("change", ["frozen", "added", "converted"])
def test_parameters_that_change_between_the_halves(change):
    run, extra = Run(PLAIN).train(0, 3), parameter(1.0, 1.0)
    opt, params = run.opt, run.params
    run.closure(3)()
    opt.move()
    opt.zero_grad()
    if change == "frozen":
        params[1].requires_grad_(False)
    elif change == "added":
        opt.add_param_group({"params": [extra]})
    else:  # as model.float() does
        for p in params:
            p.data = p.data.float()
    (run.problem.loss(params, run.problem.samples[3]) + extra.sum()).backward()
    opt.estimate()
    held = params[1].detach().clone()
    run.train(4)
    assert torch.equal(params[1], held) == (change == "frozen")
    assert opt.state[params[1]]["initialized"] == (change != "frozen")
    assert ("initialized" in opt.state.get(extra, {})) == (change == "added")
    assert opt.diagnostics()["step"] == 12


# -- a pending pair ------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [True, False])
def test_a_restart_takes_one_evaluation_and_keeps_the_sums(lost):
    run = Run(PLAIN).train(0, 4)
    opt, params, calls = run.opt, run.params, []
    if lost:  # step() restarts by itself
        evaluations = iter([run.closure(4), lambda: 1 / 0])
        with pytest.raises(ZeroDivisionError):
            opt.step(lambda: next(evaluations)())
    else:
        opt.restart()
        assert not opt.started
    before, where = opt.diagnostics(), values(params)
    opt.step(run.closure(5, calls))
    assert len(calls) == 1
    assert_same(values(params), where)  # a restart does not move
    assert all(torch.equal(opt.state[p]["estimator"], p.grad) for p in params)  # d <- g
    after = opt.diagnostics()
    assert after["sum_g_sq"] == pytest.approx(before["sum_g_sq"] + after["grad_norm"] ** 2)
    assert after["step"] == before["step"] + 1
    opt.step(run.closure(6, calls))
    assert len(calls) == 3


@pytest.mark.parametrize("half", ["move", "estimate"])
def test_an_interrupted_pass_leaves_an_optimizer_that_starts_over(half, monkeypatch):
    # Ctrl-C between two groups of a pass: half of d is the bracket, half is not.
    run = Run(PLAIN)
    opt = run.opt = PLAIN([{"params": run.params[:1]}, {"params": run.params[1:]}])
    run.train(0, 3)
    real, calls = getattr(plain, half), []

    def interrupted(*args, **options):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(plain, half, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(3, 4)
    assert not opt.started
    monkeypatch.undo()
    run.train(4, 5)
    assert all(torch.equal(opt.state[p]["estimator"], p.grad) for p in run.params)


def test_gradients_that_accumulate_count_as_computed():
    w, unused = parameter(1.0, 1.0), parameter(1.0, 1.0)
    unused.grad = torch.zeros_like(unused)
    opt = StormPlus([unused, w])
    for _ in range(3):
        opt.step(lambda: (w**2).sum().backward())
    assert opt.grad_evaluations == 5


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("way", ["step", "halves", "stale"])
def test_an_evaluation_without_a_gradient_is_refused(missing, way):
    run, calls = Run(PLAIN).train(0, 3), []
    opt, start, evaluate = run.opt, values(run.params), run.closure(3)
    opt.zero_grad()

    def closure():
        calls.append(None)
        if way != "stale":  # else the gradients of the last evaluation are still there
            opt.zero_grad()
        return None if len(calls) - 1 in missing else evaluate()

    with pytest.raises(RuntimeError, match=r"no parameter has a gradient|backward"):
        halves(opt, closure) if way == "halves" else opt.step(closure)
    assert opt.pending == (0 not in missing)
    if opt.pending:
        evaluate()  # the same sample
        opt.estimate()
    else:  # nothing has moved, and another sample may follow
        assert_same(values(run.params), start)
    run.train(4, 6)
    assert opt.diagnostics()["step"] == (5 if 0 in missing else 6)


# -- numbers that are not finite -----------------------------------------------------------------


@every_path
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), "an exception"])
def test_a_second_evaluation_that_fails_leaves_a_pair_that_estimate_completes(case, bad):
    run, twin = (Run(case, weight_decay=0.1) for _ in range(2))
    run.train(0, 7)
    before, calls = run.opt.diagnostics(), []

    def evaluate():
        run.closure(7)()
        calls.append(None)
        if len(calls) == 2:
            if bad == "an exception":
                raise FloatingPointError("of the model, about parameter 0")
            run.params[0].grad.view(-1)[1] = bad

    with pytest.raises(FloatingPointError, match="parameter 0"):
        run.opt.step(evaluate)
    assert run.opt.pending
    assert run.opt.diagnostics() == before
    evaluate()
    run.opt.estimate()
    run.train(8)
    twin.train()
    for a, b in zip(run.params, twin.params):  # the estimate taken back costs one rounding
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_sums_that_would_overflow_are_refused():
    # |g|^2 = 1e240 is a float64, |d|^2/a = 1e240 * 1e160 is not
    p = parameter(0.0)
    opt = StormPlus([p])
    with pytest.raises(FloatingPointError, match="norm"):
        given(opt, p, 1e120)
    given(opt, p, 1.0)
    assert opt.diagnostics()["sum_d_sq_over_a"] == pytest.approx(2 ** (2 / 3))


@every_path
def test_an_estimate_taken_back_never_leaves_an_inf(case):
    # d + g overflows though both are finite: d is given up there, and the pair completes
    p = nn.Parameter(torch.zeros(2))
    opt = case([p], lr=0.0)
    given(opt, p, [3e38, 1.0])
    p.grad = torch.tensor([-3e38, float("inf")])
    with pytest.raises(FloatingPointError):
        opt.move()
    p.grad = torch.zeros(2)
    opt.move()
    p.grad = torch.tensor([3e38, float("inf")])
    with pytest.raises(FloatingPointError):
        opt.estimate()
    p.grad = torch.ones(2)
    opt.estimate()
    assert torch.isfinite(opt.state[p]["estimator"]).all()
    assert opt.diagnostics()["step"] == 2


@every_path
def test_without_the_check_a_bad_gradient_spoils_d_until_a_restart_but_not_the_sums(case):
    p = nn.Parameter(torch.ones(3))
    opt = case([p], check_finite=False)
    given(opt, p, 1.0)
    opt.move()
    before = opt.diagnostics()
    p.grad = torch.tensor([1.0, float("inf"), 1.0])
    opt.estimate()
    assert not torch.isfinite(opt.state[p]["estimator"][1])
    assert torch.isfinite(p).all()  # the move did not depend on this sample
    for name in ("sum_g_sq", "sum_d_sq_over_a"):
        assert opt.diagnostics()[name] == before[name]
    opt.restart()
    given(opt, p, 1.0)
    assert torch.isfinite(opt.state[p]["estimator"]).all()
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(before["sum_g_sq"] + 3)


# -- what is refused -----------------------------------------------------------------------------

REFUSED = [
    (StormPlus, {"unit": "last"}, ValueError, "'last'"),
    (StormPlus, {"unit": 0}, ValueError, "0"),
    (StormPlus, {"unit": float("nan")}, ValueError, "nan"),
    (StormPlus, {"unit": None}, ValueError, "None"),
    (StormPlus, {"replay_rng": [3]}, TypeError, "3"),
    (StormPlus, {"replay_rng": None}, TypeError, "None"),
    (Storm, {"theta": -1}, ValueError, "-1"),
]


@pytest.mark.parametrize(("cls", "options", "error", "value"), REFUSED, ids=str)
def test_bad_arguments_of_pairs(cls, options, error, value):
    (name,) = options
    with pytest.raises(error, match=f"{name} must be .* got {value}"):
        cls([nn.Parameter(torch.ones(2))], **options)


def test_a_step_without_a_closure_shows_how_to_write_one():
    with pytest.raises(TypeError, match=r"opt.step\(closure\)"):
        Run(PLAIN).opt.step()


@pytest.mark.parametrize("rule", [None, OwnRule, OwnRule(math.nan), OwnRule(abs)], ids=str)
def test_a_rule_that_a_checkpoint_cannot_identify_is_refused(rule):
    with pytest.raises(TypeError, match=r"dataclass|numbers"):
        with_rule([nn.Parameter(torch.ones(2))], rule)


@pytest.mark.parametrize("cls", [Untuned, torch.optim.SGD])
@pytest.mark.parametrize("helper", [same_sample, verify_closure, scaled_step])
def test_helpers_for_pairs_refuse_an_optimizer_with_one_gradient_per_step(cls, helper):
    others = (None, None) if helper is scaled_step else (None,)
    with pytest.raises(ValueError, match=f"one gradient per step: {helper.__name__} is"):
        helper(cls([nn.Parameter(torch.ones(2))]), *others)
