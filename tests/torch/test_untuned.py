"""Untuned beyond the contract: the distance, the unit, and an average that comes and goes."""

import copy

import numpy as np
import pytest
import torch
from checkpoint_ways import through_dcp, through_torch_save
from optimizers import CASES, assert_same, everything, made, run_of, values
from problems_for_tests import Network
from torch import nn
from untuned_oracle import untuned_run

from stormplus import Untuned

UNTUNED = CASES[-1]
GROUPS = (0, 1, 1)  # which group a block of the network is in


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def descend(p, *rows, **options):
    """Steps of one parameter with given gradients; returns the optimizer."""
    opt = Untuned([p], **options)
    UNTUNED.descend(opt, [p], [[torch.as_tensor(row, dtype=p.dtype)] for row in rows])
    return opt


# -- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_every_number_of_every_step_equals_the_oracle(scope):
    problem = Network(samples=100)
    params = problem.parameters()
    opt = Untuned([{"params": params[:1]}, {"params": params[1:]}], scope=scope)
    rows = untuned_run(
        lambda k, x: problem.gradient(x, problem.samples[k]), problem.x0, 100,
        scope=list(GROUPS) if scope == "group" else scope,
    )  # fmt: skip
    for xi, row in zip(problem.samples, rows):
        opt.step(problem.closure(opt, params, xi))
        for name, letter in (("distance", "r"), ("step_size", "eta"), ("gain", "a")):
            close(run_of(opt)[name].numpy(), row[letter])
        for i, p in enumerate(params):
            state = opt.state[p]
            close(p.detach().numpy(), row["x"][i])
            close(state["estimator"].numpy(), row["d"][i])
            close(state["unit"].numpy(), row["s"][i])
            close(state["average"].numpy(), row["average"][i])
    opt.eval()
    for p, average in zip(params, rows[-1]["average"]):
        close(p.detach().numpy(), average)


def test_one_evaluation_a_step_with_or_without_a_closure():
    runs = []
    for with_closure in (True, False):
        problem, params, opt = made(UNTUNED)
        for xi in problem.samples:
            closure = problem.closure(opt, params, xi)
            if with_closure:
                assert opt.step(closure).item() > 0
            else:
                closure()
                assert opt.step() is None
        assert opt.grad_evaluations == 12
        runs.append(everything(opt))
    assert_same(*runs)


@pytest.mark.parametrize(
    ("loss", "point"), [(1e-6, 1.0), (1e6, 1.0), (1.0, 1e-4), (1.0, 1e4)], ids=str
)
def test_rescaling_the_objective_changes_nothing_and_the_parameters_rescales_the_run(loss, point):
    problem, ends = Network(samples=60), []
    for by_loss, by_point in ((1.0, 1.0), (loss, point)):
        params = [nn.Parameter(by_point * p.detach()) for p in problem.parameters()]
        opt = Untuned(params)
        for xi in problem.samples:
            opt.zero_grad()
            (by_loss * problem.loss([p / by_point for p in params], xi)).backward()
            opt.step()
        ends.append([p.detach() / by_point for p in params])
    for p, q, x0 in zip(*ends, problem.x0):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
        assert (p - torch.tensor(x0)).abs().max() > 1e-3


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_float32_gradients_whose_squares_leave_float32(size):
    draw, ends = torch.Generator().manual_seed(0), []
    g = torch.randn(30, 7, generator=draw)
    for scale in (1.0, size):
        p = nn.Parameter(torch.linspace(-1, 1, 7))
        descend(p, *(scale * g))
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    assert (ends[1] - torch.linspace(-1, 1, 7)).abs().min() > 1e-4


def test_the_first_step_of_one_element_by_hand():
    # r = 0.01 * 0.5, t = 1, d = s = 3: the step is 0.005 whatever the gradient is.
    p = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    descend(p, [3.0])
    assert p.item() == pytest.approx(0.495, abs=1e-15)


@pytest.mark.parametrize("start", [0.0, 0.3])  # zeros tell no scale: as if it were 1
def test_one_element_equals_the_oracle(start):
    g = torch.randn(100, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    descend(p, *g)
    rows = untuned_run(lambda k, x: [g[k].numpy()], [[start]], 100)
    close(p.detach().numpy(), rows[-1]["x"][0])
    assert rows[0]["r"][0] == pytest.approx(0.01 * (start or 1))


def test_gradients_of_zero_move_nothing_and_the_first_that_is_not_does():
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = descend(p, *[[0.0, 0.0]] * 5)
    assert p.tolist() == [1.0, -2.0]
    UNTUNED.descend(opt, [p], [[torch.ones(2)]] * 2)
    assert (p < torch.tensor([1.0, -2.0])).all()


def test_a_coordinate_without_a_gradient_and_one_that_dies():
    g = torch.randn(800, 3, generator=torch.Generator().manual_seed(0))
    g[:, 1] = 0
    g[50:, 2] = 0
    p = nn.Parameter(torch.ones(3))
    opt = descend(p, *g[:50])
    seen = [p[2].item()]
    for part in (g[50:200], g[200:]):
        UNTUNED.descend(opt, [p], [[row] for row in part])
        seen.append(p[2].item())
    assert p[1].item() == 1.0
    assert seen[0] != seen[1]  # the momentum that it had
    assert seen[2] == pytest.approx(seen[1], abs=1e-6)


def test_half_precision_is_rounded_once():
    draw = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 500, generator=draw).bfloat16()
    p = nn.Parameter(x.clone())
    descend(p, g, lr=0.9)
    step = (0.9 * 0.01 * x.double().square().mean().sqrt()).float() * g.sign().float()
    assert torch.equal(p, (x.float() - step).bfloat16())
    assert not torch.equal(p, x - step.bfloat16())  # which is rounded twice


def test_the_distance_of_float16_can_be_larger_than_float16():
    p = nn.Parameter(torch.tensor([49152.0, -49152.0], dtype=torch.float16))
    opt = descend(p, [0.0, 0.0])
    with torch.no_grad():
        p.neg_()
    UNTUNED.descend(opt, [p], [[torch.zeros(2, dtype=torch.float16)]])
    assert opt.diagnostics()["distance"] == 98304.0


def test_the_first_gradient_of_a_parameter_is_its_unit():
    p, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt, g = Untuned([p, late]), torch.tensor([3.0, -4.0])
    UNTUNED.descend(opt, [p, late], [[g, None], [g, None], [g, g]])
    assert torch.equal(opt.state[late]["unit"], g.abs())


def test_grad_scaler_in_the_ordinary_way():
    # The scale is a power of two: unscaled gradients are exact.
    problem, params, opt = made(UNTUNED)
    _, others, twin = made(UNTUNED)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, xi in enumerate(problem.samples):
        opt.zero_grad()
        scaler.scale(problem.loss(params, xi)).backward()
        if i == 5:
            params[1].grad[0] = float("inf")
        scaler.step(opt)
        scaler.update()
        if i != 5:
            twin.step(problem.closure(twin, others, xi))
    assert scaler.get_scale() == 2.0**9
    assert_same(everything(opt), everything(twin))


def test_no_wait_and_no_refusal_without_the_check():
    p = nn.Parameter(torch.ones(2))
    descend(p, [1.0, float("nan")], check_finite=False)
    assert not torch.isfinite(p).all()


# -- the average ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eval_lends_the_average_and_train_brings_x_back_exactly(dtype):
    problem, params, opt = made(UNTUNED, dtype=dtype)
    _, others, undisturbed = made(UNTUNED, dtype=dtype)
    for xi in problem.samples:
        problem.run(opt, params, [xi])
        problem.run(undisturbed, others, [xi])
        x, averages = values(params), [opt.state[p]["average"].to(dtype) for p in params]
        opt.eval()
        opt.eval()
        assert opt.at_average
        assert_same(values(params), averages)
        opt.train()
        opt.train()
        assert not opt.at_average
        assert_same(values(params), x)
        assert all("iterate" not in opt.state[p] for p in params)
    assert_same(everything(opt), everything(undisturbed))
    assert not torch.equal(x[0], averages[0])


def test_eval_before_the_first_step_changes_nothing():
    problem, params, opt = made(UNTUNED)
    opt.eval()
    assert opt.at_average
    assert_same(values(params), [torch.tensor(block) for block in problem.x0])
    opt.train()
    problem.run(opt, params)
    assert opt.diagnostics()["step"] == 12


def test_without_an_average_eval_and_train_do_nothing_and_the_run_is_the_same():
    problem, params, opt = made(UNTUNED)
    _, others, bare = made(UNTUNED, average=False)
    problem.run(opt, params)
    bare.eval()
    problem.run(bare, others, problem.samples[:6])
    bare.eval()
    assert not bare.at_average
    problem.run(bare, others, problem.samples[6:])
    bare.train()
    assert_same(values(others), values(params))
    assert "average" not in bare.state[others[0]]


def test_steps_at_the_average_are_refused():
    problem, params, opt = made(UNTUNED)
    problem.run(opt, params, problem.samples[:3])
    opt.eval()
    x, calls = values(params), []
    with pytest.raises(RuntimeError, match=r"hold the average: call opt.train\(\)"):
        opt.step(lambda: calls.append(None))
    assert not calls
    assert_same(values(params), x)


def test_freezing_the_first_parameter_at_the_average():
    problem, params, opt = made(UNTUNED)
    problem.run(opt, params, problem.samples[:5])
    x = values(params)
    opt.eval()
    params[0].requires_grad_(False)
    assert opt.at_average
    opt.train()
    assert_same(values(params), x)
    problem.run(opt, params, problem.samples[5:])
    opt.eval()
    assert torch.equal(params[0], x[0])
    assert opt.diagnostics()["step"] == 12


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", [through_torch_save, through_dcp], ids=["torch.save", "dcp"])
@pytest.mark.parametrize("lent", [True, False])  # whether the new optimizer is at an average too
def test_a_state_saved_at_the_average_goes_on(way, lent, tmp_path):
    problem = Network(samples=12)
    nets = [nn.ParameterList(Network(seed).parameters(torch.bfloat16)) for seed in (0, 0, 9)]
    whole, opt, resumed = (Untuned(net) for net in nets)
    problem.run(whole, list(nets[0]))
    problem.run(opt, list(nets[1]), problem.samples[:8])
    opt.eval()
    if lent:
        resumed.eval()
    elif way is through_dcp:  # which loads only what is there already
        with pytest.raises(
            ValueError, match=r"saved after eval\(\).*Call opt.eval\(\) before you load"
        ):
            way(nets[1], opt, nets[2], resumed, tmp_path)
        return
    way(nets[1], opt, nets[2], resumed, tmp_path)
    assert resumed.at_average
    assert_same(values(nets[1]), values(nets[2]))
    resumed.train()
    problem.run(resumed, list(nets[2]), problem.samples[8:])
    assert_same(everything(resumed), everything(whole))


def test_a_copy_made_at_the_average_is_at_the_average():
    problem, params, opt = made(UNTUNED)
    problem.run(opt, params)
    x = values(params)
    opt.eval()
    others, twin = copy.deepcopy((params, opt))
    assert twin.at_average
    twin.train()
    assert_same(values(others), x)
    assert opt.at_average


@pytest.mark.parametrize("ours", [True, False])
def test_a_state_with_or_without_an_average_is_refused_by_the_other(ours):
    saved = made(UNTUNED, average=not ours)[2].state_dict()
    message = f"saved with average={not ours}, Untuned has average={ours}"
    with pytest.raises(ValueError, match=message):
        made(UNTUNED, average=ours)[2].load_state_dict(saved)


@pytest.mark.parametrize("option", ["norm", "fused", "foreach", "max_move", "replay_rng"])
def test_options_of_pairs_are_unknown(option):
    with pytest.raises(TypeError, match=option):
        Untuned(Network().parameters(), **{option: None})
