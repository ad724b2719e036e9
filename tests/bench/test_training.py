"""The steppers against hand-written loops: same iterates, every gradient counted."""

import copy
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.nn import functional as F

from stormplus import StormPlus, Untuned, same_sample
from stormplus_bench.train import catalogue, solvers, steppers
from stormplus_bench.train.optimizers import AdamPlusPlus, NadamW, ScheduleFreePlus
from stormplus_bench.train.steppers import AtAverage, OneGradient, TwoGradients
from stormplus_bench.train.training import Training

STEPS = 12


def digits(model="mlp", budget=40):
    workload = catalogue.digits(model)
    workload.budget = budget
    return workload


def normed():
    """A network with BatchNorm, on digits."""
    workload = digits()
    layers = (nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    workload.make = lambda: nn.Sequential(nn.Flatten(), *copy.deepcopy(layers))
    return workload


def start(workload, stepper, optimizer, **options):
    """A run with a torch optimizer."""
    return Training(workload, lambda t: stepper(optimizer(t.parameters, **options)), 0)


def method(solver, **options):
    """The stepper of a method of the benchmark, at its default."""
    return partial(solver.make_stepper, lr=solver.default_lr, **solver.options | options)


def same(model, other):
    tensors = [[*m.parameters(), *m.buffers()] for m in (model, other)]
    return all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


@pytest.mark.parametrize("make", [partial(digits, "cnn"), normed])
@pytest.mark.parametrize(
    ("stepper", "optimizer", "evaluations", "samples"),
    [
        (OneGradient, torch.optim.Adam, STEPS, STEPS),
        (TwoGradients, StormPlus, 11, 6),  # 1 + 2 * 5 evaluations; the next step would make 13
    ],
)
def test_a_run_is_the_loop_of_the_readme(make, stepper, optimizer, evaluations, samples):
    workload = make()
    run = start(workload, stepper, optimizer)
    run.advance(STEPS)
    assert (run.evaluations, run.samples) == (evaluations, samples)
    model, stream = workload.model(0).train(), workload.samples(0)
    opt, calls = optimizer(model.parameters()), 0
    for x, y in itertools.islice(stream, samples):

        def closure():
            nonlocal calls
            calls += 1
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(same_sample(opt, model)(closure) if optimizer is StormPlus else closure)
    assert calls == evaluations
    assert same(run.model, model)


def test_a_run_that_benchopt_stopped_is_no_result():
    run = start(digits(), TwoGradients, StormPlus)
    run.advance(20)  # of 40
    with pytest.raises(RuntimeError, match=r"stopped at 19 of 40 .* --no-timeout"):
        run.require_whole()
    run.advance(40)
    run.require_whole()  # 39: a step more would overspend
    run.evaluations, run.status = 19, "diverged"
    run.require_whole()  # diverged is a result


def moments(t, g, s, b1, b2):
    """Adam's corrected moments; `s` has those before the correction."""
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    return s["m"] / (1 - b1**t), s["v"] / (1 - b2**t)


def adamw(t, p, g, s, *, betas, decay=0.0):
    m, v = moments(t, g, s, *betas)
    return p - 3e-3 * (m / (v.sqrt() + 1e-8) + decay * p)


def mars_update(t, p, g, old, s):
    c = g + 0.025 * (0.95 / (1 - 0.95)) * (g - old) if t > 1 else g
    return adamw(t, p, c / max(1, c.norm()), s, betas=(0.95, 0.99))


def mars_approximate_update(t, p, g, old, s):
    if p.ndim != 2:
        return adamw(t, p, g, s, betas=(0.9, 0.95), decay=0.1)
    c = g + 0.025 * (0.95 / (1 - 0.95)) * (g - s.get("last", 0))
    s["last"] = g
    return adamw(t, p, c / max(1, c.norm()), s, betas=(0.95, 0.99))


def nadamw_update(t, p, g, old, s):
    (b1, b2), decay, lr = NadamW.BETAS, NadamW.WEIGHT_DECAY, NadamW.LR
    m, v = moments(t, g, s, b1, b2)
    ahead = b1 * m + (1 - b1) * g / (1 - b1**t)
    return (1 - lr * decay) * p - lr * ahead / (v.sqrt() + 1e-8)


@pytest.mark.parametrize(
    ("stepper", "update", "evaluations", "samples"),
    [
        (method(solvers.mars), mars_update, 11, 6),
        (method(solvers.mars_approximate), mars_approximate_update, 12, 12),
        (lambda t: OneGradient(NadamW(t.parameters)), nadamw_update, 12, 12),
    ],
    ids=["MARS", "MARS approximate", "NadamW"],
)
def test_a_method_is_its_papers_update_per_tensor(stepper, update, evaluations, samples):
    workload = digits()
    run = Training(workload, stepper, 0)
    run.advance(STEPS)
    assert (run.evaluations, run.samples) == (evaluations, samples)
    model, stream = workload.model(0), workload.samples(0)
    previous, states = copy.deepcopy(model), [{} for _ in model.parameters()]
    for t in range(1, samples + 1):
        x, y = next(stream)
        grads, olds = (
            torch.autograd.grad(F.cross_entropy(m(x), y), list(m.parameters()))
            for m in (model, previous)
        )
        previous.load_state_dict(model.state_dict())
        with torch.no_grad():
            for p, g, old, state in zip(model.parameters(), grads, olds, states, strict=True):
                p.copy_(update(t, p, g, old, state))
    torch.testing.assert_close(vector_of(run.model), vector_of(model), rtol=1e-5, atol=1e-7)


def test_svrg_is_its_formula_and_pays_for_its_anchors():
    workload = catalogue.logistic_breast_cancer()  # 455 rows in batches of 16: 29 batches
    workload.budget = 100
    run = Training(workload, method(solvers.svrg), 0)
    run.advance(100)
    problem = workload.problem
    x, stream = problem.start(0), workload.samples(0)
    evaluations, left = 0, 0
    while evaluations + 2 <= 100:
        if left == 0 and evaluations + 29 + 2 <= 100:
            anchor, full, left = x.copy(), problem.full_grad(x), 29
            evaluations += 29
        xi = next(stream)
        x = x - 0.1 * (problem.grad(x, xi) - problem.grad(anchor, xi) + full)
        evaluations, left = evaluations + 2, max(0, left - 1)
    assert run.evaluations == evaluations == 99
    np.testing.assert_allclose(run.model.x.detach().numpy(), x, rtol=1e-10, atol=1e-12)


def test_samples_and_the_start_depend_on_the_seed_alone():
    workload = digits()
    for seed in (0, 1):
        assert torch.equal(*(next(workload.samples(seed))[1] for _ in range(2)))
        assert same(workload.model(seed), workload.model(seed))
    assert not torch.equal(next(workload.samples(0))[1], next(workload.samples(1))[1])
    assert not same(workload.model(0), workload.model(1))


def test_divergence_is_a_status_and_keeps_the_curve():
    run = start(digits(), OneGradient, torch.optim.SGD, lr=1e30)
    run.advance(0)
    assert math.isfinite(run.record()["train_loss"])
    run.advance(20)
    assert run.status == "diverged"
    assert run.record()["train_loss"] == math.inf
    assert len(run.curve["train_loss"]) == 2
    assert run.evaluations < 20


def test_dog_with_a_nan_diverges():
    run = Training(digits(), method(solvers.dog), 0)
    next(run.model.parameters()).register_hook(lambda g: g * math.nan)
    run.advance(STEPS)
    assert run.status == "diverged"


@pytest.mark.parametrize("stepper", [method(solvers.dog), method(solvers.adamw, variant="average")])
def test_an_averaged_method_is_measured_at_its_average(stepper):
    run = Training(digits(), stepper, 0)
    assert run.stepper.result(run) is run.model  # there is no average yet
    points = []
    for step in range(1, 5):
        run.advance(step)
        points.append(vector_of(run.model))
    mean = points[0]
    for t in (2, 3, 4):  # Shamir and Zhang (2013): weights like t^8
        mean = mean + 9 / (8 + t) * (points[t - 1] - mean)
    torch.testing.assert_close(vector_of(run.stepper.result(run)), mean)


def test_the_state_counts_all_that_a_method_keeps():
    size = sum(p.nbytes for p in digits().model(0).parameters()) / 2**20
    for solver, buffers in {
        solvers.sgd_momentum: 1,
        solvers.dog: 2,  # the start and the average
        solvers.mechanic: 3,
        solvers.mars: 3,
        solvers.schedule_free_plus: 5,
        solvers.mars_approximate: 3,
        solvers.svrg: 2,
    }.items():
        run = Training(digits(), method(solver), 0)
        run.advance(5)
        assert run.stepper.state_mb == pytest.approx(buffers * size, rel=0.02)


@pytest.mark.parametrize("optimizer", [AdamWScheduleFree, Untuned, ScheduleFreePlus])
def test_a_method_with_an_average_is_measured_there_and_continues(optimizer):
    workload = normed()
    stepper = steppers.AtAverageWithLoss if optimizer is ScheduleFreePlus else AtAverage
    measured, plain = (start(workload, stepper, optimizer) for _ in range(2))
    for run in (measured, plain):
        run.advance(STEPS)
    before = [p.detach().clone() for p in measured.model.parameters()]
    judged = measured.stepper.result(measured)
    # At x, not at the y of the gradients; and statistics of 50 fresh samples there.
    for p, q, y in zip(judged.parameters(), measured.model.parameters(), before, strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, y)
    assert judged[2].num_batches_tracked - measured.model[2].num_batches_tracked == 50
    measured.stepper.resume()
    for run in (measured, plain):
        run.advance(2 * STEPS)
    ends = (vector_of(run.model) for run in (measured, plain))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)  # train() and eval() round


@pytest.mark.parametrize(("variant", "quarter"), [("cosine", 1 + 0.5**0.5), ("linear", 1.5)])
def test_the_scheduled_rate_rises_in_a_line_and_falls_to_zero(variant, quarter):
    stepper = partial(solvers.adamw.make_stepper, lr=2.0, variant=variant)
    run = Training(digits(budget=80), stepper, 0)
    rates = []
    for step in range(1, 81):
        rates.append(run.stepper.optimizer.param_groups[0]["lr"])
        run.advance(step)
    # 4 of 80 steps rise: 1/4, 2/4, 3/4, 1 of the rate; then 76 fall.
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert (rates[23], rates[42]) == pytest.approx((quarter, 1.0))
    assert run.stepper.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def on_one_vector(workload):
    """All weights as one vector, and the loss and its gradient there on the next sample."""
    model, stream = workload.model(0), workload.samples(0)
    parameters = list(model.parameters())

    def at(x):
        nn.utils.vector_to_parameters(x, parameters)
        inputs, targets = next(stream)
        loss = F.cross_entropy(model(inputs), targets)
        return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    return vector_of(model), at


def vector_of(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_adam_plus_plus_is_its_papers_recursion_with_adams_correction():
    run = start(digits(), OneGradient, AdamPlusPlus)
    run.advance(STEPS)
    x, at = on_one_vector(digits())
    origin, largest, s = x.clone(), 0 * x, {}
    eta = 1e-6 * (1 + float(x.norm()))
    for t in range(1, STEPS + 1):
        _, g = at(x)
        eta = max(eta, float((x - origin).norm()) / len(x) ** 0.5)
        m, v = moments(t, g, s, 0.9, 0.999)
        largest = torch.maximum(largest, v)
        x = x - eta * m / (1e-8 + (t * largest).sqrt())
    moved = float((x - origin).abs().max())
    assert eta > 2e-6 * (1 + float(origin.norm()))  # the distance counts
    torch.testing.assert_close(vector_of(run.model), x, rtol=0, atol=1e-2 * moved)


def test_schedule_free_plus_is_its_papers_recursion_with_polyaks_step():
    run = start(digits(), steppers.AtAverageWithLoss, ScheduleFreePlus)
    run.advance(STEPS)
    x, at = on_one_vector(digits())
    y = z = x
    largest, weights, s = 0.0, [], {}
    for t in range(1, STEPS + 1):
        loss, g = at(y)
        value = loss + 0.9 * float(g @ (z - x))
        size = max(0.0, value) / (float(g.abs().sum()) * math.sqrt(math.pi / 2))
        m, v = moments(t, g, s, 0.9, 0.95)
        z = z - size * m / (v.sqrt() + 1e-8)
        largest = max(largest, size)
        weights.append(largest**2)
        c = weights[-1] / sum(weights)
        x = (1 - c) * x + c * z
        y = 0.9 * x + 0.1 * z
    torch.testing.assert_close(vector_of(run.model), y, rtol=1e-4, atol=1e-6)
    judged = run.stepper.result(run)
    torch.testing.assert_close(vector_of(judged), x, rtol=1e-4, atol=1e-6)


def test_losses_accuracies_and_gradients_of_the_measured_examples():
    workload = digits()
    model = workload.model(0)
    x, y = workload.train.tensors
    loss = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = math.sqrt(sum(float((g**2).sum()) for g in grads))
    assert workload.full_grad_norm(model) == pytest.approx(expected, rel=1e-4)
    measured = workload.measure(model)
    assert measured["train_loss"] == pytest.approx(loss.item(), rel=1e-5)
    right = (model(x).argmax(1) == y).float().mean()
    assert measured["train_accuracy"] == pytest.approx(float(right), abs=1e-6)
