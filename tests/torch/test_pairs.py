"""What the paired optimizers do beyond the contract: two gradients a sample, move and estimate."""

import copy
from dataclasses import dataclass

import pytest
import torch
from optimizers import (
    PLAIN,
    OwnRule,
    assert_same,
    every_paired,
    every_path,
    everything,
    halves,
    made,
    on,
    values,
)  # fmt: skip
from problems_for_tests import backward
from torch import nn
from torch.optim import lr_scheduler

from stormplus import Storm, StormPlus, Untuned
from stormplus.torch import PairedOptimizer, same_sample, scaled_step, verify_closure
from stormplus.torch.kernels import plain


def given(opt, p, *rows):
    """Steps by halves with gradients of one parameter; both of a pair are the same."""
    for row in rows:

        def evaluate(row=row):
            p.grad = torch.as_tensor(row, dtype=p.dtype).expand_as(p).clone()

        halves(opt, evaluate)


# -- a step --------------------------------------------------------------------------------------


def test_a_missing_closure_shows_the_lines_to_write():
    with pytest.raises(TypeError, match=r"(?s)StormPlus .*def closure\(\).*opt.step\(closure\)"):
        made(PLAIN)[2].step()


# -- the unit of the gradient --------------------------------------------------------------------

FIRST = {"unit": "first", "lr": 0.1}
UNITS = {
    "first": (FIRST, FIRST),
    "first, decoupled": ({"weight_decay": 0.1, "decoupled_weight_decay": True} | FIRST,) * 2,
    "a number": ({"lr": 0.1}, {"unit": "factor", "lr": 0.1}),
}


@every_paired
@pytest.mark.parametrize("factor", [1e-140, 1e-6, 1e6, 1e120])
@pytest.mark.parametrize("name", UNITS)
def test_a_loss_that_is_multiplied_by_its_unit_makes_the_same_run(case, factor, name):
    runs, (bare, scaled) = [], UNITS[name]
    scaled = {k: factor if v == "factor" else v for k, v in scaled.items()}
    for times, options in ((1.0, bare), (factor, scaled)):
        problem, params, opt = made(case, samples=30, **options)
        for xi in problem.samples:
            case.step(opt, on(opt, lambda: times * problem.loss(params, xi)))
        runs.append((values(params), opt.diagnostics()))
    (expected, bare), (found, scaled) = runs
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    for name in ("unit", "grad_norm", "estimator_norm"):  # those stay as they are measured
        bare[name] *= factor
    assert scaled == pytest.approx(bare, rel=1e-8)


def test_the_unit_is_the_first_gradient_that_is_not_zero_with_weight_decay():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
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


def test_the_unit_is_in_checkpoints_and_copies():
    problem, params, opt = made(StormPlus, unit="first")
    problem.run(opt, params, problem.samples[:4])
    unit, twin = opt.diagnostics()["unit"], StormPlus(problem.parameters(), unit="first")
    twin.load_state_dict(opt.state_dict())
    assert twin.diagnostics()["unit"] == copy.deepcopy(opt).diagnostics()["unit"] == unit != 1.0
    with pytest.raises(ValueError, match=r"saved with unit='first', StormPlus has unit=2\.0"):
        StormPlus(params, unit=2.0).load_state_dict(opt.state_dict())


def test_a_first_gradient_that_is_not_finite_is_not_the_unit():
    p = nn.Parameter(torch.ones(1))
    opt = StormPlus([p], unit="first")
    with pytest.raises(FloatingPointError):
        given(opt, p, float("inf"))
    given(opt, p, 3.0)
    assert opt.diagnostics()["unit"] == 3.0


# -- move and estimate ---------------------------------------------------------------------------


@every_paired
def test_the_halves_are_the_step(case):
    ends = []
    for step in (lambda opt, evaluate: opt.step(evaluate), halves):
        problem, params, opt = made(case, samples=8)
        schedule = lr_scheduler.ExponentialLR(opt, 0.9)
        for xi in problem.samples:
            step(opt, problem.closure(opt, params, xi))
            schedule.step()  # without a warning
        ends.append(everything(opt))
    assert_same(*ends)


def test_the_wrong_order_raises_and_changes_nothing():
    problem, params, opt = made(PLAIN)
    backward(problem, opt, params, problem.samples[0])
    with pytest.raises(RuntimeError, match=r"call only estimate"):
        opt.move()
    opt.estimate()
    with pytest.raises(RuntimeError, match="estimate\\(\\) comes after move"):
        opt.estimate()
    opt.move()
    before = everything(opt)
    with pytest.raises(RuntimeError, match="evaluate the same sample and call estimate"):
        opt.move()
    assert_same(everything(opt), before)
    assert opt.pending
    opt.estimate()
    assert opt.started
    assert not opt.pending


def test_only_trainable_parameters_that_have_had_a_gradient_have_an_estimator():
    problem, params, opt = made(PLAIN)
    assert not opt.has_estimator(params[0])
    problem.run(opt, params, problem.samples[:1])
    params[0].requires_grad_(False)
    assert [opt.has_estimator(p) for p in params] == [False, True, True]


def test_pass_hooks_see_the_gradients_failures_and_restarts():
    p = nn.Parameter(torch.ones(2))
    opt, events = StormPlus([p]), []
    opt.register_pass_hook(lambda o, event: events.append((event, o.pending, float(p.grad[0]))))
    given(opt, p, 1.0, 2.0)
    assert events == [
        ("before_estimate", False, 1.0), ("after_estimate", False, 1.0),
        ("before_move", False, 2.0), ("after_move", True, 2.0),
        ("before_estimate", True, 2.0), ("after_estimate", False, 2.0),
    ]  # fmt: skip
    events.clear()
    p.grad = torch.full((2,), float("nan"))
    with pytest.raises(FloatingPointError):
        opt.move()
    opt.restart()
    assert [event for event, *_ in events] == ["before_move", "failed", "restarted"]


@pytest.mark.parametrize("change", ["frozen", "added", "converted"])
def test_parameters_that_change_between_the_halves(change):
    problem, params, opt = made(PLAIN)
    problem.run(opt, params, problem.samples[:3])
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    backward(problem, opt, params, problem.samples[3])
    opt.move()
    opt.zero_grad()
    if change == "frozen":
        params[1].requires_grad_(False)
    elif change == "added":
        opt.add_param_group({"params": [extra]})
    else:  # as model.float() does
        for p in params:
            p.data = p.data.float()
    (problem.loss(params, problem.samples[3]) + extra.sum()).backward()
    opt.estimate()
    held = params[1].detach().clone()
    problem.run(opt, params, problem.samples[4:])
    assert torch.equal(params[1], held) == (change == "frozen")
    assert ("estimator" in opt.state[params[1]]) == (change != "frozen")
    assert opt.has_estimator(extra) == (change == "added")
    assert opt.diagnostics()["step"] == 12


# -- a pending pair ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("when", [1, 2])
def test_a_closure_that_raises_leaves_a_run_that_goes_on(when):
    # First: everything as it was. Second: a pair that estimate() completes.
    problem, params, opt = made(PLAIN)
    _, others, twin = made(PLAIN)
    for i, xi in enumerate(problem.samples):
        closure = problem.closure(opt, params, xi)
        if i in (0, 4)[when - 1 :]:
            with pytest.raises(Boom):
                opt.step(failing(closure, when))
            assert opt.pending == (when == 2)
        if opt.pending:
            closure()
            opt.estimate()
        else:
            opt.step(closure)
        twin.step(problem.closure(twin, others, xi))
    assert_same(values(params), values(others))
    assert opt.diagnostics() == twin.diagnostics()


@pytest.mark.parametrize("lost", [True, False])
def test_a_restart_takes_one_evaluation_and_keeps_the_sums(lost):
    problem, params, opt = made(PLAIN)
    problem.run(opt, params, problem.samples[:4])
    if lost:  # step() restarts by itself
        with pytest.raises(Boom):
            opt.step(failing(problem.closure(opt, params, problem.samples[4]), when=2))
    else:
        opt.restart()
        assert not opt.started
    before, where, calls = opt.diagnostics(), values(params), []
    opt.step(problem.closure(opt, params, problem.samples[5], calls))
    assert len(calls) == 1
    assert_same(values(params), where)  # a restart does not move
    assert all(torch.equal(opt.state[p]["estimator"], p.grad) for p in params)  # d <- g
    after = opt.diagnostics()
    assert after["sum_g_sq"] == pytest.approx(before["sum_g_sq"] + after["grad_norm"] ** 2)
    assert after["step"] == before["step"] + 1
    opt.step(problem.closure(opt, params, problem.samples[6], calls))
    assert len(calls) == 3


@pytest.mark.parametrize("half", ["move", "estimate"])
def test_an_interrupted_pass_leaves_an_optimizer_that_starts_anew(half, monkeypatch):
    # Ctrl-C between two groups of a pass: half of d is the bracket, half is not.
    problem, params, _ = made(PLAIN)
    opt = StormPlus([{"params": params[:1]}, {"params": params[1:]}], foreach=False)
    problem.run(opt, params, problem.samples[:3])
    real, calls = getattr(plain, half), []

    def interrupted(*args, **options):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(plain, half, interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.step(problem.closure(opt, params, problem.samples[3]))
    assert not opt.started
    monkeypatch.undo()
    opt.step(problem.closure(opt, params, problem.samples[4]))
    assert all(torch.equal(opt.state[p]["estimator"], p.grad) for p in params)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_closure_that_computes_nothing_the_second_time_is_refused(set_to_none):
    problem, params, opt = made(PLAIN)
    good = problem.closure(opt, params, problem.samples[0], set_to_none=set_to_none)
    opt.step(good)
    opt.step(good)
    calls = []

    def idle():
        calls.append(None)
        return good() if len(calls) == 1 else None

    with pytest.raises(RuntimeError, match="has not computed a gradient"):
        opt.step(idle)
    assert opt.pending  # as after any second evaluation that fails
    opt.step(good)
    assert not opt.pending


def test_gradients_that_accumulate_count_as_computed():
    w, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    unused.grad = torch.zeros(2)
    opt = StormPlus([unused, w])
    for _ in range(3):
        opt.step(lambda: (w**2).sum().backward())
    assert opt.grad_evaluations == 5


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("by", ["step", "halves"])
def test_an_evaluation_without_any_gradient_is_refused(missing, by):
    problem, params, opt = made(PLAIN)
    problem.run(opt, params, problem.samples[:3])
    start, calls = values(params), []
    evaluate = problem.closure(opt, params, problem.samples[3])

    def closure():
        calls.append(1)
        opt.zero_grad()
        return None if len(calls) - 1 in missing else evaluate()

    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step(closure) if by == "step" else halves(opt, closure)
    assert opt.pending == (0 not in missing)
    if opt.pending:
        evaluate()  # the same sample
        opt.estimate()
    else:  # nothing has moved, and another sample may follow
        assert_same(values(params), start)
    problem.run(opt, params, problem.samples[4:6])
    assert opt.diagnostics()["step"] == (5 if 0 in missing else 6)


# -- numbers that are not finite -----------------------------------------------------------------


@every_path
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_second_evaluation_that_is_not_finite_leaves_a_pair_that_estimate_completes(case, bad):
    problem, params, opt = made(case, weight_decay=0.1)
    _, others, twin = made(case, weight_decay=0.1)
    for i, xi in enumerate(problem.samples):
        twin.step(problem.closure(twin, others, xi))
        if i != 7:
            opt.step(problem.closure(opt, params, xi))
            continue
        before, calls = opt.diagnostics(), []

        def evaluate():
            backward(problem, opt, params, xi)
            calls.append(None)
            if len(calls) == 2:
                params[0].grad.view(-1)[1] = bad

        with pytest.raises(FloatingPointError, match="the step is pending"):
            opt.step(evaluate)
        assert opt.pending
        assert opt.diagnostics() == before | {"grad_evaluations": before["grad_evaluations"] + 1}
        evaluate()
        opt.estimate()
    for a, b in zip(params, others):  # the estimate taken back costs one rounding
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_sums_that_would_overflow_are_refused():
    # |g|^2 = 1e240 is a float64, |d|^2/a = 1e240 * 1e160 is not
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = StormPlus([p])
    with pytest.raises(FloatingPointError, match="a squared norm or a sum of them is not finite"):
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
    with pytest.raises(FloatingPointError, match="nothing has moved"):
        opt.move()
    p.grad = torch.zeros(2)
    opt.move()
    p.grad = torch.tensor([3e38, float("inf")])
    with pytest.raises(FloatingPointError, match="pending"):
        opt.estimate()
    p.grad = torch.ones(2)
    opt.estimate()
    assert torch.isfinite(opt.state[p]["estimator"]).all()
    assert opt.diagnostics()["step"] == 2


@every_path
def test_without_the_check_d_takes_what_comes_until_a_restart_and_the_sums_do_not(case):
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


# -- arguments and rules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unit": "last"}, ValueError, "unit must be .* got 'last'"),
        ({"unit": 0}, ValueError, "got 0"),
        ({"unit": float("nan")}, ValueError, "got nan"),
        ({"unit": None}, ValueError, "got None"),
        ({"replay_rng": [3]}, TypeError, "list of torch.Generator, got 3"),
        ({"replay_rng": None}, TypeError, "list of torch.Generator, got None"),
    ],
    ids=str,
)
def test_bad_arguments_of_pairs(options, error, message):
    with pytest.raises(error, match=message):
        StormPlus([nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize("name", ["theta", "w", "c", "smoothness"])
def test_the_constants_of_storm_are_checked_copied_and_saved(name):
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=f"{name} must be a positive finite number, got -1"):
        Storm(params, **{name: -1})
    opt = Storm(params, **{name: 0.25}, weight_decay=0.01)
    assert getattr(copy.deepcopy(opt).rule, name) == getattr(opt.rule, name) == 0.25
    with pytest.raises(ValueError, match=f"saved with {name}=0.25, Storm has {name}="):
        Storm(params).load_state_dict(opt.state_dict())
    twin = Storm(params, **{name: 0.25})
    twin.load_state_dict(opt.state_dict())
    assert twin.param_groups[0]["weight_decay"] == 0.01


@dataclass(frozen=True)
class RuleWithUnit:
    unit: float = 1.0  # a name that the optimizer uses too

    def __call__(self, sums, g_sq, d_sq, t):
        return sums, 0.5 + 0 * g_sq, self.unit + 0 * g_sq


def optimizer_with(rule):
    return type("Mine", (PairedOptimizer,), {"rule": rule})([nn.Parameter(torch.ones(2))])


RULES = {
    "none": None,
    "function": abs,
    "type": OwnRule,
    "nan": RuleWithUnit(float("nan")),
    "function in a field": RuleWithUnit(abs),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_a_checkpoint_cannot_identify_is_refused(name):
    with pytest.raises(TypeError, match=r"frozen dataclass|fields must be numbers"):
        optimizer_with(RULES[name])


def test_a_rule_is_known_by_every_field():
    saved = optimizer_with(RuleWithUnit(1.0)).state_dict()
    with pytest.raises(ValueError, match=r"saved with unit=1.0, Mine has unit=2.0"):
        optimizer_with(RuleWithUnit(2.0)).load_state_dict(saved)


HELPERS = {
    "same_sample": lambda opt, scaler: same_sample(opt, nn.Linear(1, 1)),
    "verify_closure": lambda opt, scaler: verify_closure(opt, pytest.fail),
    "scaled_step": lambda opt, scaler: scaled_step(opt, scaler, pytest.fail),
}


@pytest.mark.parametrize("cls", [Untuned, torch.optim.SGD])
@pytest.mark.parametrize("name", HELPERS)
def test_what_makes_pairs_refuses_an_optimizer_that_takes_one_gradient(cls, name):
    opt = cls([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=f"one gradient per step: {name} is not needed"):
        HELPERS[name](opt, torch.amp.GradScaler("cpu"))
