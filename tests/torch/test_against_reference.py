"""Every rule, norm, scope and option of the torch optimizers against independent runs."""

import numpy as np
import pytest
import torch
from oracle import Group, algorithm_1
from problems_for_tests import Network

from stormplus import SimplifiedStormPlus, Storm, StormPlus, minimize

CLASSES = {"storm+": StormPlus, "simplified-storm+": SimplifiedStormPlus, "storm": Storm}
PATHS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

# Both sides round at 1e-16 a few hundred times a step. At lr 0.3 the runs on this problem
# contract, and after 200 steps they are 3e-14 apart at most; 1e-10 leaves three digits of
# room, and a wrong formula is off by far more. (At lr 1 the mean norm's steps are large
# enough for chaos: rounding grows to 1e-4 whoever computes it.)
LR = 0.3
RTOL, ATOL = 1e-10, 1e-12


def check(params, blocks):
    for p, block in zip(params, blocks, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), block, rtol=RTOL, atol=ATOL)


def estimators(opt, params):
    return [opt.state[p]["estimator"] for p in params]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("norm", ["raw", "mean"])
@pytest.mark.parametrize("method", CLASSES)
def test_equals_minimize_over_200_steps(method, norm, scope, path):
    problem = Network()
    stream = iter(problem.samples)
    result = minimize(
        problem.gradient, problem.x0, lambda rng: next(stream), 200,
        method=method, norm=norm, scope=scope, lr=LR,
    )  # fmt: skip
    params = problem.parameters()
    opt = CLASSES[method](params, lr=LR, norm=norm, scope=scope, **PATHS[path])
    problem.run(opt, params)
    check(params, result.x)
    check(estimators(opt, params), result.estimator)
    home = opt._run
    for name in ("gain", "step_size", "sum_g_sq", "sum_d_sq_over_a"):
        np.testing.assert_allclose(home[name].numpy(), np.atleast_1d(result[name]), rtol=RTOL)


OPTIONS = {
    "L2": {"weight_decay": 0.1, "lr": LR},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True, "lr": LR},
    "maximize": {"maximize": True, "lr": 0.2},
    "maximize with L2": {"maximize": True, "weight_decay": 0.3, "lr": 0.2},
    "default lr": {},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", CLASSES)
def test_options_equal_the_literal_algorithm(method, options, path):
    problem, chosen = Network(), OPTIONS[options]
    expected = algorithm_1(
        problem.gradient,
        [Group(problem.x0, chosen.get("lr", 1.0), chosen.get("weight_decay", 0.0))],
        problem.samples,
        method=method,
        decoupled=chosen.get("decoupled_weight_decay", False),
        maximize=chosen.get("maximize", False),
    )
    params = problem.parameters()
    opt = CLASSES[method](params, **chosen, **PATHS[path])
    problem.run(opt, params)
    check(params, expected.x[-1])
    check(estimators(opt, params), expected.d[-1])


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_groups_and_a_schedule_equal_the_literal_algorithm(scope, decoupled):
    problem = Network()
    warm = lambda move: 0.2 + min(move, 50) / 50  # noqa: E731
    expected = algorithm_1(
        problem.gradient,
        [
            Group(problem.x0[:2], lr=lambda move: 0.3 * warm(move), weight_decay=0.05),
            Group(problem.x0[2:], lr=lambda move: 0.2 * warm(move)),
        ],
        problem.samples,
        norm="mean",
        scope=scope,
        decoupled=decoupled,
    )
    params = problem.parameters()
    groups = [{"params": params[:2], "lr": 0.3, "weight_decay": 0.05}, {"params": params[2:]}]
    opt = StormPlus(groups, lr=0.2, norm="mean", scope=scope, decoupled_weight_decay=decoupled)
    # The scheduler's value at index t is in force when sample t + 1 makes the t-th move.
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, warm)
    for xi in problem.samples:
        opt.step(problem.closure(opt, params, xi))
        schedule.step()
    check(params, expected.x[-1])
    check(estimators(opt, params), expected.d[-1])


def test_tensor_learning_rate_equals_a_number():
    runs = []
    for lr in (0.5, torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5])):
        problem = Network(samples=20)
        params = problem.parameters()
        opt = StormPlus(params, lr=lr)
        problem.run(opt, params)
        runs.append([p.detach().clone() for p in params])
    for other in runs[1:]:
        for a, b in zip(runs[0], other):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_move_and_estimate_are_the_step(path):
    problem = Network(samples=50)
    params, others = problem.parameters(), problem.parameters()
    opt, by_hand = StormPlus(params, **PATHS[path]), StormPlus(others, **PATHS[path])
    problem.run(opt, params)
    for xi in problem.samples:
        if by_hand.started:
            by_hand.zero_grad()
            problem.loss(others, xi).backward()
            by_hand.move()
        by_hand.zero_grad()
        problem.loss(others, xi).backward()
        by_hand.estimate()
    for a, b in zip(params, others):
        assert torch.equal(a, b)
    assert opt.diagnostics() == by_hand.diagnostics()


def test_noiseless_estimator_is_the_gradient():
    # The paper's induction: with one sample d_t = grad f(x_t) at every step.
    problem = Network(samples=1)
    params = problem.parameters()
    opt = StormPlus(params)
    for _ in range(100):
        opt.step(problem.closure(opt, params, problem.samples[0]))
        true = problem.gradient([p.detach().numpy() for p in params], problem.samples[0])
        for d, g in zip(estimators(opt, params), true):
            np.testing.assert_allclose(d.numpy(), g, rtol=0, atol=1e-14)


@pytest.mark.parametrize("path", PATHS)
def test_float32_follows_float64(path):
    problem = Network(samples=100)
    exact, rounded = problem.parameters(), problem.parameters(torch.float32)
    for params in (exact, rounded):
        problem.run(StormPlus(params, lr=LR, **PATHS[path]), params)
    for a, b in zip(exact, rounded):
        torch.testing.assert_close(a, b.double(), rtol=1e-4, atol=1e-5)


def test_max_move_bounds_every_move():
    problem = Network(samples=60)
    params = problem.parameters()
    opt = StormPlus(params, lr=0.5, max_move=0.01)
    lengths, unbounded = [], []
    for xi in problem.samples:
        before = [p.detach().clone() for p in params]
        numbers = opt.diagnostics()
        opt.step(problem.closure(opt, params, xi))
        lengths.append(sum((p - b).square().sum() for p, b in zip(params, before)).sqrt().item())
        unbounded.append(0.5 * numbers["step_size"] * numbers["estimator_norm"])
    assert max(unbounded) > 0.015  # the bound had something to do
    np.testing.assert_allclose(lengths[1:], np.minimum(unbounded[1:], 0.01), rtol=1e-9)
