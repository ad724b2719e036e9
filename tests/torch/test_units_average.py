"""Untuned: the average comes and goes exactly, and is never in the way."""

import numpy as np
import pytest
import torch
from problems_for_tests import Network
from units_oracle import units_run

from stormplus import Untuned

BOTH = pytest.mark.parametrize("correction", [False, True])


def made(dtype=torch.float64, **options):
    problem = Network(samples=20)
    params = problem.parameters(dtype)
    return problem, params, Untuned(params, 0.3, **options)


def values(params):
    return [p.detach().clone() for p in params]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_eval_lends_the_average_and_train_brings_x_back_exactly(correction, dtype):
    problem, params, opt = made(dtype, correction=correction)
    _, others, undisturbed = made(dtype, correction=correction)
    for xi in problem.samples:
        problem.run(opt, params, [xi])
        problem.run(undisturbed, others, [xi])
        x = values(params)
        averages = [opt.state[p]["average"].to(dtype) for p in params]
        opt.eval()
        opt.eval()
        assert opt.at_average
        assert same(values(params), averages)
        opt.train()
        opt.train()
        assert not opt.at_average
        assert same(values(params), x)
        assert all("point" not in opt.state[p] for p in params)
    assert same(values(params), values(others))
    assert not same(x, averages)


@BOTH
def test_the_average_is_the_references(correction):
    problem, params, opt = made(correction=correction)
    problem.run(opt, params, problem.samples)
    opt.eval()
    rows = units_run(
        lambda k, x, _: problem.gradient(x, problem.samples[k]),
        problem.x0, 20, correction=correction, lr=0.3,
    )  # fmt: skip
    for p, average in zip(params, rows[-1]["average"]):
        np.testing.assert_allclose(p.detach().numpy(), average, rtol=0, atol=1e-10)


@BOTH
def test_eval_before_the_first_step_and_without_an_average(correction):
    for options in ({}, {"average": False}):
        problem, params, opt = made(correction=correction, **options)
        problem.run(opt, params, problem.samples[: 0 if not options else 5])
        x = values(params)
        opt.eval()
        assert opt.at_average
        assert same(values(params), x)
        opt.train()
        problem.run(opt, params, problem.samples[5:])
        assert not same(values(params), x)
        assert ("average" in opt.state[params[0]]) == (not options)


@BOTH
def test_the_average_never_influences_x(correction):
    runs = []
    for average in (True, False):
        problem, params, opt = made(correction=correction, average=average)
        problem.run(opt, params, problem.samples)
        runs.append(values(params))
    assert same(*runs)


@BOTH
def test_steps_at_the_average_are_refused(correction):
    problem, params, opt = made(correction=correction)
    problem.run(opt, params, problem.samples[:3])
    opt.eval()
    x, calls = values(params), []
    for call in (lambda: opt.step(lambda: calls.append(None)), opt.move, opt.estimate):
        with pytest.raises(RuntimeError, match=r"hold the average: call opt.train\(\)"):
            call()
    assert not calls
    assert same(values(params), x)
