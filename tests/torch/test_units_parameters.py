"""Untuned at the edges: extreme gradients, every kind of parameter, frozen, missing."""

import numpy as np
import pytest
import torch
from problems_for_tests import Network, backward
from torch import nn
from units_oracle import units_run

from stormplus import Untuned

BOTH = pytest.mark.parametrize("correction", [False, True])
CALM = {False: 1.0, True: 0.3}  # see test_units.py


def descend(opt, params, gradients):
    """Steps with given gradients; with a correction both of a sample are the same."""
    for grads in gradients:

        def closure():
            for p, g in zip(params, grads):
                p.grad = None if g is None else g.clone()

        opt.step(closure)


def noise(shape, steps, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(steps, *shape, generator=draw, dtype=torch.float64).to(dtype)


@BOTH
@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_float32_gradients_whose_squares_leave_float32(correction, size):
    g = noise((7,), 30, dtype=torch.float32)
    ends = []
    for scale in (1.0, size):
        p = nn.Parameter(torch.linspace(-1, 1, 7))
        descend(Untuned([p], correction=correction), [p], [[scale * row] for row in g])
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    assert (ends[1] - torch.linspace(-1, 1, 7)).abs().min() > 1e-4


@BOTH
def test_gradients_of_zero_move_nothing_and_the_first_that_is_not_does(correction):
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = Untuned([p], correction=correction)
    zero, one = torch.zeros(2), torch.tensor([1.0, 1.0])
    descend(opt, [p], [[zero]] * 5)
    assert torch.equal(p, torch.tensor([1.0, -2.0]))
    assert opt.diagnostics()["grad_norm"] == 0
    descend(opt, [p], [[one]] * 2)
    assert torch.isfinite(p).all()
    assert (p < torch.tensor([1.0, -2.0])).all()


@BOTH
def test_one_element(correction):
    g = noise((1,), 100)
    p = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
    descend(Untuned([p], correction=correction), [p], [[row] for row in g])
    rows = units_run(lambda k, x, _: [g[k].numpy()], [[0.3]], 100, correction=correction)
    np.testing.assert_allclose(p.detach().numpy(), rows[-1]["x"][0], rtol=1e-10)


def test_the_first_step_of_one_element_by_hand():
    # r = 0.01 * 0.5, t = 1, d = s = 3: the step is 0.005 whatever the gradient is.
    p = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    descend(Untuned([p]), [p], [[torch.tensor([3.0], dtype=torch.float64)]])
    assert p.item() == pytest.approx(0.495, abs=1e-15)


@BOTH
def test_starting_from_zero(correction):
    problem = Network(samples=50)
    problem.x0[0] *= 0
    only = problem.parameters()[:1]
    rest = [p.detach() for p in problem.parameters()[1:]]
    opt = Untuned(only, 0.3, correction=correction)
    for xi in problem.samples:

        def closure():
            opt.zero_grad()
            problem.loss([*only, *rest], xi).backward()

        opt.step(closure)
    others = problem.x0[1:]
    rows = units_run(
        lambda k, x, _: problem.gradient([*x, *others], problem.samples[k])[:1],
        problem.x0[:1], 50, correction=correction, lr=0.3,
    )  # fmt: skip
    assert rows[0]["r"][0] == 0.01
    np.testing.assert_allclose(only[0].detach().numpy(), rows[-1]["x"][0], rtol=0, atol=1e-10)


def test_a_coordinate_without_a_gradient_and_one_that_dies():
    g = noise((3,), 800, dtype=torch.float32)
    g[:, 1] = 0
    g[50:, 2] = 0
    p = nn.Parameter(torch.ones(3))
    opt = Untuned([p])
    descend(opt, [p], [[row] for row in g[:50]])
    dying = p[2].item()
    descend(opt, [p], [[row] for row in g[50:200]])
    dead = p[2].item()
    descend(opt, [p], [[row] for row in g[200:]])
    assert torch.isfinite(p).all()
    assert p[1].item() == 1.0
    assert dead != dying  # the momentum that it had
    assert p[2].item() == pytest.approx(dead, abs=1e-6)


@BOTH
def test_bf16_has_float32_buffers_and_follows_float64(correction):
    problem = Network(samples=60)
    params, wide = problem.parameters(torch.bfloat16), problem.parameters()
    for p, q in zip(params, wide):
        q.data.copy_(p.detach())
    opt = Untuned(params, 0.3, correction=correction)
    twin = Untuned(wide, 0.3, correction=correction)
    problem.run(opt, params)
    problem.run(twin, wide)
    for p, q in zip(params, wide):
        state = opt.state[p]
        wanted = {"estimator", "average"} | ({"gradient_unit"} if not correction else set())
        assert {state[name].dtype for name in wanted} == {torch.float32}
        assert state["origin"].dtype == torch.bfloat16
        torch.testing.assert_close(p.double(), q.double(), rtol=0.1, atol=0.1)
        torch.testing.assert_close(state["average"].double(), twin.state[q]["average"],
                                   rtol=0.1, atol=0.1)  # fmt: skip


def test_half_precision_is_rounded_once():
    p = nn.Parameter(noise((500,), 1, dtype=torch.bfloat16)[0])
    x, g = p.detach().clone(), noise((500,), 1, seed=1, dtype=torch.bfloat16)[0]
    descend(Untuned([p], 0.9), [p], [[g]])
    step = (0.9 * 0.01 * x.double().square().mean().sqrt()).float() * g.sign().float()
    assert torch.equal(p, (x.float() - step).bfloat16())
    assert not torch.equal(p, x - step.bfloat16())  # which is rounded twice


def test_the_distance_of_float16_can_be_larger_than_float16():
    p = nn.Parameter(torch.tensor([49152.0, -49152.0], dtype=torch.float16))
    opt = Untuned([p])
    descend(opt, [p], [[torch.zeros(2, dtype=torch.float16)]])
    with torch.no_grad():
        p.neg_()
    descend(opt, [p], [[torch.zeros(2, dtype=torch.float16)]])
    assert opt.diagnostics()["distance"] == 98304.0


@BOTH
def test_complex_parameters_are_pairs_of_reals(correction):
    g = noise((4, 2), 40)
    x = noise((4, 2), 1, seed=1)[0]
    z = nn.Parameter(torch.view_as_complex(x.clone()))
    p = nn.Parameter(x.clone())
    descend(
        Untuned([z], correction=correction), [z], [[torch.view_as_complex(r)] for r in g]
    )
    descend(Untuned([p], correction=correction), [p], [[row] for row in g])
    torch.testing.assert_close(torch.view_as_real(z), p, rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 3),
        lambda t: torch.stack([t, t], dim=-1)[..., 0],
    ],
    ids=["channels_last", "transposed", "strided"],
)
def test_the_layout_in_memory_does_not_matter(correction, layout):
    shape = (2, 3, 4, 2)
    x, g = noise(shape, 1, seed=1)[0], noise(shape, 20)
    p, q = nn.Parameter(layout(x)), nn.Parameter(layout(x).contiguous())
    assert not p.is_contiguous()
    for param in (p, q):
        grads = [[layout(row).contiguous()] for row in g]
        opt = Untuned([param], correction=correction)
        descend(opt, [param], grads)
        opt.eval()
    torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    assert not p.is_contiguous()


@BOTH
def test_empty_tensors_change_nothing(correction):
    problem = Network(samples=10)
    params, others = problem.parameters(), problem.parameters()
    empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    empty.grad = torch.zeros_like(empty)
    opt = Untuned([*params, empty], CALM[correction], correction=correction)
    for xi in problem.samples:

        def closure():
            backward(problem, opt, params, xi)
            empty.grad = torch.zeros_like(empty)

        opt.step(closure)
    problem.run(Untuned(others, CALM[correction], correction=correction), others)
    assert all(torch.equal(a, b) for a, b in zip(params, others))
    opt.eval()
    opt.train()
    assert all(torch.equal(a, b) for a, b in zip(params, others))
