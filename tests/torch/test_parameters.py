"""Parameters that join, freeze, have no gradient, or are of an unusual kind."""

import numpy as np
import pytest
import torch
from problems_for_tests import Network
from torch import nn

from stormplus import SimplifiedStormPlus, StormPlus

PATHS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def stepper(opt, loss_of):
    def step(*args):
        def closure():
            opt.zero_grad()
            loss = loss_of(*args)
            loss.backward()
            return loss

        return opt.step(closure)

    return step


@pytest.mark.parametrize("path", PATHS)
def test_both_zero_grad_modes_give_the_same_run(path):
    runs = []
    for set_to_none in (True, False):
        problem = Network(samples=50)
        params = problem.parameters()
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        opt = StormPlus([*params, extra], **PATHS[path])
        for i, xi in enumerate(problem.samples):

            def closure(i=i, xi=xi):
                opt.zero_grad(set_to_none=set_to_none)
                loss = problem.loss(params, xi)
                if i % 3 == 0:  # `extra` takes part in one sample of three
                    loss = loss + torch.sin(extra).sum()
                loss.backward()
                return loss

            opt.step(closure)
        runs.append([p.detach().clone() for p in (*params, extra)])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_missing_gradient_is_a_zero_gradient_and_the_parameter_still_moves():
    p, q = (nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64)) for _ in range(2))
    opt = StormPlus([p, q])
    step = stepper(opt, lambda use_q: (p**2).sum() + ((q**2).sum() if use_q else 0))
    step(True)
    d = opt.state[q]["estimator"].clone()
    numbers, before = opt.diagnostics(), q.detach().clone()
    step(False)
    np.testing.assert_allclose(q.detach(), before - numbers["step_size"] * d, rtol=1e-15)
    np.testing.assert_allclose(opt.state[q]["estimator"], (1 - numbers["gain"]) * d, rtol=1e-15)


@pytest.mark.parametrize("path", PATHS)
def test_missing_gradient_still_has_its_weight_decay(path):
    # L2 is part of the objective: with no gradient of the loss, g = weight_decay x.
    p, q = (nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64)) for _ in range(2))
    opt = StormPlus([p, q], lr=0.0, weight_decay=0.5, **PATHS[path])
    step = stepper(opt, lambda use_q: (p**2).sum() + ((q**2).sum() if use_q else 0))
    step(True)
    d, a = opt.state[q]["estimator"].clone(), opt.diagnostics()["gain"]
    step(False)
    decay = 0.5 * q.detach()
    torch.testing.assert_close(opt.state[q]["estimator"], decay + (1 - a) * (d - decay))


def test_bucket_without_a_gradient_waits():
    p, q = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    opt = SimplifiedStormPlus([p, q], scope="tensor")
    step = stepper(opt, lambda use_q: (p**2).sum() + ((q**2).sum() if use_q else 0))
    for use_q in (False, False, False, True):
        step(use_q)
    assert opt.state[p]["step"].tolist() == [4.0, 1.0]
    assert opt.state[p]["gain"].tolist() == pytest.approx([4 ** (-2 / 3), 1.0])
    numbers = opt.diagnostics()
    q.grad = None
    assert numbers["step_size_min"] > 0


def test_mean_norm_counts_parameters_without_a_gradient_too():
    p, q = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    opt = StormPlus([p, q], norm="mean")
    stepper(opt, lambda: (p**2).sum())()
    assert opt.diagnostics()["sum_g_sq"] == pytest.approx(8 / 4)


def test_zeros_left_over_from_before_freezing_do_not_join():
    runs = []
    for set_to_none in (True, False):
        p, q = (nn.Parameter(torch.full((2,), 2.0, dtype=torch.float64)) for _ in range(2))
        opt = StormPlus([p, q])

        def step(use_q, set_to_none=set_to_none, p=p, q=q, opt=opt):
            def closure():
                opt.zero_grad(set_to_none=set_to_none)
                loss = 50 * (p**2).sum() + ((q**2).sum() if use_q else 0)
                loss.backward()
                return loss

            opt.step(closure)

        for use_q in (True, True):
            step(use_q)
        q.requires_grad_(False)
        step(False)
        q.requires_grad_(True)
        step(False)
        step(True)
        runs.append(opt.state[q]["estimator"].clone())
        assert torch.equal(runs[-1], q.grad)  # whole, not a thousandth
    assert torch.equal(*runs)


def test_parameter_that_joins_takes_its_gradient_whole():
    p = nn.Parameter(torch.full((2,), 2.0, dtype=torch.float64))
    q = nn.Parameter(torch.full((3,), 3.0, dtype=torch.float64))
    opt = StormPlus([p])
    step = stepper(opt, lambda: 50 * (p**2).sum() + (q**2).sum())
    for _ in range(5):
        step()
    assert opt.diagnostics()["gain"] < 1e-2  # d from zero would get a hundredth
    opt.add_param_group({"params": [q]})
    before = q.detach().clone()
    step()
    assert torch.equal(q, before)  # nothing known of it, so it has not moved yet
    assert torch.equal(opt.state[q]["estimator"], q.grad)
    step()
    assert not torch.equal(q, before)


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_joining_keeps_what_the_others_have_learned(scope):
    p, q = (nn.Parameter(torch.full((2,), 2.0, dtype=torch.float64)) for _ in range(2))
    opt = StormPlus([p], scope=scope)
    step = stepper(opt, lambda: (p**2).sum() + (q**2).sum())
    step()
    step()
    known = opt.state[p]["sum_g_sq"].clone()
    opt.add_param_group({"params": [q], "lr": 0.5})
    step()
    sums, steps = opt.state[p]["sum_g_sq"], opt.state[p]["step"]
    assert sums[0] > known[0]
    assert steps.tolist() == ([3.0] if scope == "global" else [3.0, 1.0])


def test_freezing_drops_the_estimator_and_unfreezing_starts_anew():
    p, q = (nn.Parameter(torch.full((2,), 2.0, dtype=torch.float64)) for _ in range(2))
    opt = StormPlus([p, q])
    step = stepper(opt, lambda: (p**2).sum() + (q**2).sum())
    step()
    step()
    q.requires_grad_(False)
    before = q.detach().clone()
    step()
    step()
    assert torch.equal(q, before)
    assert "estimator" not in opt.state[q]
    norm = opt.diagnostics()["grad_norm"]
    assert norm == pytest.approx(float(p.grad.norm()))  # q.grad is left over, and ignored
    q.requires_grad_(True)
    step()
    assert torch.equal(q, before)
    assert torch.equal(opt.state[q]["estimator"], q.grad)
    step()
    assert not torch.equal(q, before)


def test_frozen_from_the_start_even_as_the_first_parameter():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    opt = StormPlus(model.named_parameters(), norm="mean")
    x, before = torch.randn(5, 3), model[0].weight.clone()
    step = stepper(opt, lambda: model(x).square().mean())
    for _ in range(4):
        step()
    assert torch.equal(model[0].weight, before)
    trainable = [p for p in model.parameters() if p.requires_grad]
    before = opt.diagnostics()
    step()
    after = opt.diagnostics()
    mean = sum(float(p.grad.square().sum()) for p in trainable) / 9  # 4 + 4 + 1 trainable
    assert after["sum_g_sq"] - before["sum_g_sq"] == pytest.approx(mean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", PATHS)
def test_half_precision_parameters_have_a_float32_estimator_that_decays(path, dtype):
    # d <- (1 - a)(d - 0) + 0 with a = 1e-3: in bf16 the factor rounds to 1.
    p = nn.Parameter(torch.ones(8, dtype=dtype))
    opt = StormPlus([p], lr=0.0, **PATHS[path])
    p.grad = torch.full_like(p, 64.0)  # sum |g|^2 = 32768: a = 32769^(-2/3) = 9.8e-4
    opt.estimate()
    d = opt.state[p]["estimator"]
    assert d.dtype == torch.float32
    p.grad = torch.zeros_like(p)
    opt.move()
    opt.estimate()
    expected = 64 * (1 - 32769 ** (-2 / 3))
    torch.testing.assert_close(opt.state[p]["estimator"], torch.full((8,), expected))


@pytest.mark.parametrize("path", PATHS)
def test_half_precision_follows_float32(path):
    # x is rounded to bf16 (8 bits) after each move: 20 moves of relative error 2^-9 each
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(100).to(torch.bfloat16).to(dtype))
        opt = StormPlus([p], weight_decay=0.1, lr=0.3, **PATHS[path])
        step = stepper(opt, lambda: torch.sin(p.float()).sum())
        for _ in range(20):
            step()
        runs.append(p.detach().float())
    torch.testing.assert_close(*runs, rtol=20 * 2**-9, atol=0.02)


@pytest.mark.parametrize("path", PATHS)
def test_mixed_dtypes_shapes_and_strides_in_one_optimizer(path):
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(3, dtype=torch.float64)),
        nn.Parameter(torch.randn(4, 5)),
        nn.Parameter(torch.randn(6).bfloat16()),
        nn.Parameter(torch.tensor(1.5)),
        nn.Parameter(torch.empty(0, 7)),
        nn.Parameter(torch.randn(5, 4).t()),
        nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    ]
    # a scope of its own for each, so that the rounding of one does not reach the others
    opt = StormPlus(params, scope="tensor", **PATHS[path])
    twins = [p.detach().double().requires_grad_() for p in params]
    reference = StormPlus(twins, scope="tensor")
    step = stepper(opt, lambda: sum((1 - torch.cos(p.double())).sum() for p in params))
    other = stepper(reference, lambda: sum((1 - torch.cos(p)).sum() for p in twins))
    for _ in range(10):
        step()
        other()
    for p, twin in zip(params, twins):
        tolerance = 0.05 if p.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p.double(), twin, rtol=tolerance, atol=tolerance)
    assert not params[5].is_contiguous()


@pytest.mark.parametrize("path", ["plain", "foreach", "fused"])
def test_complex_parameters_are_pairs_of_reals(path):
    torch.manual_seed(0)
    z = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    xy = nn.Parameter(torch.view_as_real(z.detach()).clone())
    opt, twin = StormPlus([z], **PATHS[path]), StormPlus([xy], **PATHS[path])
    target = torch.randn(5, dtype=torch.complex128)
    step = stepper(opt, lambda: torch.log1p((z - target).abs().square()).sum())
    other = stepper(
        twin, lambda: torch.log1p((torch.view_as_complex(xy) - target).abs().square()).sum()
    )
    for _ in range(20):
        step()
        other()
    torch.testing.assert_close(torch.view_as_real(z), xy, rtol=1e-12, atol=0)
    means = [StormPlus([t], norm="mean") for t in (z, xy)]
    for opt in means:
        opt.estimate()
    assert means[0].diagnostics()["sum_g_sq"] == pytest.approx(means[1].diagnostics()["sum_g_sq"])


def test_sparse_gradients_are_refused_before_anything_has_moved():
    table = nn.Embedding(10, 3, sparse=True)
    dense = nn.Parameter(torch.ones(3))
    opt = StormPlus([{"params": [dense]}, {"params": table.parameters()}])
    before = dense.detach().clone()
    step = stepper(opt, lambda i: (table(torch.tensor([1, i])) * dense).sum())
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1.* is sparse.*sparse=False"):
        step(2)
    assert torch.equal(dense, before)
    assert not opt.started


def test_gradients_are_never_written_or_kept():
    p = nn.Parameter(torch.ones(4, dtype=torch.float64))
    opt = StormPlus([p], weight_decay=0.5, maximize=True)
    for _ in range(3):
        p.grad = torch.full_like(p, 2.0)
        copy = p.grad.clone()
        if opt.started:
            opt.move()
            assert torch.equal(p.grad, copy)
        opt.estimate()
        assert torch.equal(p.grad, copy)
        assert opt.state[p]["estimator"].data_ptr() != p.grad.data_ptr()


def test_module_moved_to_another_dtype_after_construction():
    model = nn.Linear(3, 1)
    opt = StormPlus(model.parameters())
    model.double()
    x = torch.randn(4, 3, dtype=torch.float64)
    step = stepper(opt, lambda: model(x).square().mean())
    for _ in range(3):
        step()
    assert opt.state[model.weight]["estimator"].dtype == torch.float64
    d = opt.state[model.weight]["estimator"].clone()
    model.float()
    opt.zero_grad()
    model(x.float()).square().mean().backward()
    opt.move()  # with what it knew, in the new precision
    expected = d - model.weight.grad.double()  # the innovation
    torch.testing.assert_close(
        opt.state[model.weight]["estimator"].double(), expected, rtol=1e-5, atol=1e-6
    )
