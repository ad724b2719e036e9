"""The benchmark's loop against hand-written ones: same points, every gradient counted."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stormplus import StormPlus, same_sample

pytestmark = pytest.mark.usefixtures("benchmark")
STEPS = 12


def training(workload, stepper, seed=0):
    from benchmark_utils.training import Training

    return Training(workload, stepper, seed)


def digits(model="cnn", budget=40):
    from benchmark_utils.network_workloads import digits

    workload = digits(model)
    workload.budget = budget
    return workload


class Normed:
    """A network workload with BatchNorm, on digits."""

    def __new__(cls):
        workload = digits("mlp")
        workload.make = lambda: torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, 16, bias=False),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 10),
        )
        return workload


def points(model):
    return [p.detach().clone() for p in (*model.parameters(), *model.buffers())]


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(points(model), points(other), strict=True))


@pytest.mark.parametrize("make", [digits, Normed], ids=["cnn", "batchnorm"])
def test_a_one_gradient_method_is_the_usual_loop(make):
    from benchmark_utils.steppers import OneGradient

    workload = make()
    run = training(workload, lambda t: OneGradient(torch.optim.Adam(t.model.parameters())))
    run.advance(STEPS)
    model, stream = workload.model(0).train(), workload.samples(0)
    opt = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x, y = next(stream)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    assert same(run.model, model)
    assert (run.evaluations, run.samples) == (STEPS, STEPS)


@pytest.mark.parametrize("make", [digits, Normed], ids=["cnn", "batchnorm"])
def test_ours_is_the_loop_of_the_readme_and_costs_two(make):
    from benchmark_utils.steppers import TwoGradients

    workload = make()
    run = training(workload, lambda t: TwoGradients(StormPlus(t.model.parameters())))
    run.advance(STEPS)
    # 1 + 2 * 5 = 11 evaluations; the next step would make 13.
    assert (run.evaluations, run.samples) == (11, 6)
    model, stream, calls = workload.model(0).train(), workload.samples(0), 0
    opt = StormPlus(model.parameters())
    for _ in range(6):
        x, y = next(stream)

        def closure():
            nonlocal calls
            calls += 1
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(same_sample(opt, model)(closure))
    assert calls == run.evaluations
    assert same(run.model, model)


def test_a_run_that_was_stopped_from_outside_is_no_result():
    from benchmark_utils.steppers import TwoGradients

    run = training(digits(), lambda t: TwoGradients(StormPlus(t.model.parameters())))
    run.advance(20)  # of 40
    with pytest.raises(RuntimeError, match=r"stopped at 19 of 40 .* --no-timeout"):
        run.require_whole()
    run.advance(40)
    run.require_whole()  # 39: a step more would overspend
    run.evaluations, run.status = 19, "diverged"
    run.require_whole()  # diverged is a result


def test_mars_is_its_papers_recursion_with_an_explicit_previous_iterate():
    from benchmark_utils.variance_reduction import Mars

    workload = digits("mlp")
    run = training(workload, lambda t: Mars(t.model, 3e-3))
    run.advance(STEPS)
    # Literal, per tensor: c = g + 0.025 * 0.95 / 0.05 (g - g'), clipped; then AdamW.
    model, stream = workload.model(0), workload.samples(0)
    old = copy.deepcopy(model)
    state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    evaluations = 0
    for t in range(1, 8):
        x, y = next(stream)
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        olds = torch.autograd.grad(F.cross_entropy(old(x), y), list(old.parameters()))
        evaluations += 1 if t == 1 else 2
        if evaluations > STEPS:
            break
        old.load_state_dict(model.state_dict())
        with torch.no_grad():
            for p, g, h, (m, v) in zip(model.parameters(), grads, olds, state, strict=True):
                c = g if t == 1 else g + 0.025 * 0.95 / 0.05 * (g - h)
                c = c / c.norm() if c.norm() > 1 else c
                m.copy_(0.95 * m + 0.05 * c)
                v.copy_(0.99 * v + 0.01 * c * c)
                step = (m / (1 - 0.95**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
                p.sub_(3e-3 * step)
    assert (run.evaluations, run.samples) == (11, 6)
    for p, q in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_svrg_is_its_formula_and_pays_for_its_anchors(benchmark):
    from benchmark_utils.smooth_workloads import logistic_breast_cancer
    from benchmark_utils.variance_reduction import Svrg

    workload = logistic_breast_cancer()  # 455 rows in batches of 16: 29 batches
    workload.budget = 100
    run = training(workload, lambda t: Svrg(t.model, 0.1))
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
    workload = digits("mlp")
    for seed in (0, 1):
        first = [next(workload.samples(seed))[1] for _ in range(2)]
        assert torch.equal(*first)
        assert same(workload.model(seed), workload.model(seed))
    assert not torch.equal(next(workload.samples(0))[1], next(workload.samples(1))[1])
    assert not same(workload.model(0), workload.model(1))


def test_divergence_is_a_status_and_keeps_the_curve():
    from benchmark_utils.steppers import OneGradient

    workload = digits("mlp")
    run = training(workload, lambda t: OneGradient(torch.optim.SGD(t.model.parameters(), lr=1e30)))
    run.advance(0)
    assert math.isfinite(run.record()["train_loss"])
    run.advance(20)
    assert run.status == "diverged"
    assert run.record()["train_loss"] == math.inf
    assert len(run.curve["train_loss"]) == 2
    assert run.evaluations < 20


def test_a_loss_that_is_only_large_may_come_back():
    from benchmark_utils.smooth_workloads import phase_retrieval
    from benchmark_utils.steppers import OneGradient

    class Kick(OneGradient):
        """Far away, and back: as D-Adaptation does on this very problem."""

        def step(self, training):
            super().step(training)
            with torch.no_grad():
                training.model.x += {1: 100.0, 2: -100.0}.get(training.evaluations, 0.0)

    run = training(
        phase_retrieval(), lambda t: Kick(torch.optim.Adagrad(t.model.parameters(), lr=0.1))
    )
    run.advance(0)
    start = run.record()["train_loss"]
    run.advance(1)
    assert run.record()["train_loss"] > 1e5 * start
    run.advance(100)
    assert run.status == "done"
    assert run.record()["train_loss"] < start


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_dog_that_meets_a_number_that_is_none_diverges(broken):
    from benchmark_utils.steppers import Averaged

    dog = pytest.importorskip("dog")
    run = training(
        digits("mlp"),
        lambda t: Averaged(dog.DoG(t.model.parameters()), dog.PolynomialDecayAverager(t.model)),
    )
    parameter = next(run.model.parameters())
    if broken == "loss":
        parameter.data.fill_(math.nan)
    else:
        parameter.register_hook(lambda g: g * math.nan)
    run.advance(STEPS)
    assert run.status == "diverged"


def test_the_state_counts_all_that_a_method_keeps():
    from benchmark_utils.steppers import Averaged, OneGradient

    dog, mechanic = pytest.importorskip("dog"), pytest.importorskip("mechanic_pytorch")
    size = sum(p.nbytes for p in digits("mlp").model(0).parameters()) / 2**20
    makers = {
        1: lambda t: OneGradient(torch.optim.SGD(t.model.parameters(), momentum=0.9)),
        2: lambda t: Averaged(
            dog.DoG(t.model.parameters()), dog.PolynomialDecayAverager(t.model)
        ),  # the start and the average
        3: lambda t: OneGradient(mechanic.mechanize(torch.optim.AdamW)(t.model.parameters())),
    }
    for buffers, make in makers.items():
        run = training(digits("mlp"), make)
        run.advance(3)
        assert run.stepper.state_mb == pytest.approx(buffers * size, rel=0.02)


def test_the_averaged_point_is_what_dog_is_judged_by():
    from benchmark_utils.steppers import Averaged

    dog = pytest.importorskip("dog")
    workload = digits("mlp")
    run = training(
        workload,
        lambda t: Averaged(dog.DoG(t.model.parameters()), dog.PolynomialDecayAverager(t.model)),
    )
    run.advance(STEPS)
    judged = run.stepper.result(run)
    assert not same(judged, run.model)
    assert same(judged, run.stepper.averager.averaged_model)


def test_schedule_free_is_judged_at_its_evaluation_point_and_goes_on():
    from benchmark_utils.steppers import ScheduleFree

    schedulefree = pytest.importorskip("schedulefree")
    workload = Normed()
    make = lambda t: ScheduleFree(schedulefree.AdamWScheduleFree(t.model.parameters()))  # noqa: E731
    measured, plain = training(workload, make), training(workload, make)
    for run in (measured, plain):
        run.advance(STEPS)
    before = [p.detach().clone() for p in measured.model.parameters()]
    judged = measured.stepper.result(measured)
    # At x, not at the y of the gradients; and statistics of 50 fresh batches there.
    for p, q, y in zip(judged.parameters(), measured.model.parameters(), before, strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, y)
    seen = judged[2].num_batches_tracked - measured.model[2].num_batches_tracked
    assert seen == 50
    measured.stepper.resume(measured)
    for run in (measured, plain):
        run.advance(2 * STEPS)
    for p, q in zip(measured.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)  # train() and eval() round


def test_peak_memory_sees_what_was_used_and_forgets():
    from benchmark_utils.training import peak_memory_mb, reset_peak_memory

    reset_peak_memory()
    before = peak_memory_mb()
    block = torch.ones(40 * 2**18)  # 40 MB
    assert peak_memory_mb() >= before + 30
    del block
    reset_peak_memory()
    if torch.cuda.is_available() or Path("/proc/self/status").exists():
        assert peak_memory_mb() <= before + 20


def test_the_measured_gradient_norm_is_that_of_the_measured_examples():
    workload = digits("mlp")
    model = workload.model(0)
    x, y = workload.train
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    expected = math.sqrt(sum(float((g**2).sum()) for g in grads))
    assert workload.full_grad_norm(model) == pytest.approx(expected, rel=1e-4)
    measured = workload.measure(model)
    assert measured["train_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    right = (model(x).argmax(1) == y).float().mean()
    assert measured["train_accuracy"] == pytest.approx(float(right), abs=1e-6)
