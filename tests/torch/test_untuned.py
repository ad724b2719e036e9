"""What only Untuned does: bounded steps, two buffers, an average that comes and goes."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from stormplus import Untuned
from stormplus.torch.kernels import native
from tests.support.untuned_oracle import untuned_run
from tests.torch.optimizers import UNTUNED, Run, assert_same, noise, per_tensor

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def descend(p, *rows, **options):
    """Take steps of one parameter with given gradients; return the optimizer."""
    opt = Untuned([p], **options)
    UNTUNED.descend(opt, [p], [[torch.as_tensor(row, dtype=p.dtype)] for row in rows])
    return opt


def fast_iterate(opt, p):
    return p.detach() + 0.9 * opt.state[p]["z_minus_x"]


@pytest.fixture(params=["native", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(native, "LIBRARY", None)
    elif native.LIBRARY is None:
        pytest.skip("the native passes were not built")


each_path = pytest.mark.usefixtures("path")


# -- the numbers ---------------------------------------------------------------------------------


@each_path
def test_every_number_equals_the_oracle_where_gradients_are_missing():
    """The gradients agree, so that the step size grows; the second tensor misses some.

    The first tensor's scale is its start, those of the others follow from their shapes.
    """
    shapes, steps = ((5, 3), (4, 2, 3, 3), (4,)), 50
    rows = [1 + 0.5 * noise(steps, *shape, seed=i) for i, shape in enumerate(shapes)]
    start = [size * noise(*shape, seed=9) for size, shape in zip((1, 0.01, 0), shapes)]

    def gradients(k):
        return [rows[0][k], None if k % 3 == 2 or k < 4 else rows[1][k], rows[2][k]]

    expected = untuned_run(
        lambda k, _: [g if g is None else g.numpy() for g in gradients(k)],
        [block.numpy() for block in start], steps, weight_decay=0.3,
    )  # fmt: skip
    params = [nn.Parameter(block.clone()) for block in start]
    opt = Untuned(params, weight_decay=0.3)
    names = {"step_size": "eta", "distance": "r", "evidence": "evidence"}
    names |= {"effective_steps": "effective_steps"}
    for k, row in enumerate(expected):
        UNTUNED.descend(opt, params, [gradients(k)])
        started = row["t"] > 0
        for ours, theirs in names.items():
            close(per_tensor(opt, ours).numpy()[started], row[theirs][started])
        for i, p in enumerate(params):
            close(p.detach().numpy(), row["x"][i])
            close(fast_iterate(opt, p).numpy(), row["z"][i])
            close(opt.state[p]["grad_rms"].numpy(), row["s"][i])
    assert (per_tensor(opt, "evidence") > 10).all()
    opt.eval()
    for p, average in zip(params, expected[-1]["average"]):
        close(p.detach().numpy(), average)


@each_path
def test_a_large_tensor_is_measured_on_a_sample_and_in_chunks():
    shape = (301, 250)  # 75,250 elements: three native chunks, every 17th is measured
    g, x = noise(6, *shape), noise(*shape, seed=1) / 20
    p = nn.Parameter(x.clone())
    opt = descend(p, *g)
    rows = untuned_run(lambda k, _: [g[k].numpy()], [x.numpy()], 6, sample=4096)
    assert opt.state[p]["initial_sample"].shape == (4427,)
    close(p.detach().numpy(), rows[-1]["x"][0])
    close(per_tensor(opt, "distance").numpy(), rows[-1]["r"])
    everywhere = untuned_run(lambda k, _: [g[k].numpy()], [x.numpy()], 6)
    assert rows[-1]["r"][0] == pytest.approx(everywhere[-1]["r"][0], rel=0.05)


# -- moves and evidence --------------------------------------------------------------------------


@each_path
def test_a_coordinate_that_wakes_moves_no_further_than_the_distance():
    """After zeros a gradient is 4 times its root mean square, and a step would be 4 r."""
    p = nn.Parameter(torch.ones(4))
    opt = descend(p, *torch.zeros(50, 4), [1e-3, -1e3, 1.0, 0.0])
    moved = fast_iterate(opt, p) - 1
    torch.testing.assert_close(moved, torch.tensor([-1, 1, -1, 0]) / 200)  # R is 1, r is R / 200


def agree(opt, steps=50):
    """Take steps with gradients that agree; return the evidence of the first parameter."""
    params = opt.parameters()
    rows = [[torch.ones_like(p) if p.requires_grad else None for p in params]] * steps
    UNTUNED.descend(opt, params, rows)
    return float(per_tensor(opt, "evidence")[0])


def zeros(*shape, trainable=True, **options):
    return {"params": [nn.Parameter(torch.zeros(shape), requires_grad=trainable)]} | options


CANNOT_MOVE = {  # a tensor's shape, and the group of another one
    "factor of 0": ((16, 16), zeros(16, 16, factor=0.0)),
    "empty": ((16,), zeros(0, 3)),
    "frozen": ((16,), zeros(16, 16, trainable=False)),
}


@pytest.mark.parametrize("name", CANNOT_MOVE)
def test_a_tensor_that_cannot_move_does_not_count_in_the_evidence(name):
    shape, other = CANNOT_MOVE[name]
    assert agree(Untuned([zeros(*shape), other])) == agree(Untuned([zeros(*shape)])) > 1e4


def test_a_noisy_matrix_does_not_count_while_it_is_frozen():
    small, noisy = params = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16, 16))
    opt = Untuned(params)
    UNTUNED.descend(opt, params, [[torch.ones(16), g] for g in noise(30, 16, 16, dtype=F32)])
    assert per_tensor(opt, "evidence")[0] < 10
    noisy.requires_grad_(False)
    before = agree(opt)
    assert before > 1e4
    noisy.requires_grad_(True)
    UNTUNED.descend(opt, params, [[torch.ones(16), None]] * 3)
    assert per_tensor(opt, "evidence")[0] == before  # it has a matrix to wait for


# -- learning rates and arguments ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: Untuned([p], lr=1e-3), TypeError, "no learning rate"),
        (lambda p: Untuned([p], 1e-3), TypeError, "no learning rate"),
        (lambda p: Untuned([{"params": [p], "lr": 1e-3}]), ValueError, "lr=0.001"),
        (lambda p: Untuned([p], state_dtype=F16), ValueError, "torch.float16"),
    ],
    ids=["keyword", "position", "group", "state_dtype"],
)
def test_bad_arguments_of_untuned(make, error, message):
    with pytest.raises(error, match=message):
        make(nn.Parameter(torch.ones(2)))


def test_a_group_that_comes_later_may_have_a_part_of_the_lr(recwarn):
    """As trainers unfreeze a backbone: at the lr of the rest, or a tenth of it."""
    first, second, third = (nn.Parameter(torch.ones(n).double()) for n in (1, 2, 3))
    opt = Untuned([first])
    opt.param_groups[0]["lr"] = 0.5  # by a schedule
    opt.add_param_group({"params": [second], "lr": 0.5})
    assert not recwarn
    with pytest.warns(UserWarning, match=r"added with lr=0.05"):
        opt.add_param_group({"params": [third], "lr": 0.05})
    UNTUNED.descend(
        opt, [first, second, third], [[torch.ones_like(p) for p in (first, second, third)]]
    )
    moved = [float((1 - p).abs().max()) for p in (first, second, third)]
    assert moved[1:] == pytest.approx([moved[0], 0.1 * moved[0]])
    opt.reset()  # in the middle of a schedule
    assert opt.param_groups[0]["lr"] == 0.5


LRS = {  # of the first steps of a run, and the number of warnings
    "a learning rate": ([6e-4, 5e-4], 1),
    "decay": ([1.0, 1e-3, 0.0], 0),
    "warm-up": ([0.05, 0.01], 0),
    "warm-up from 0": ([0.0, 0.5], 0),
}


@pytest.mark.parametrize("name", LRS)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_learning_rate_is_warned_of_once_and_a_schedule_is_not(name, resumed, recwarn):
    p, (lrs, count) = nn.Parameter(torch.ones(2)), LRS[name]
    p.grad, opt = torch.ones(2), Untuned([p])
    for lr in lrs:
        opt.param_groups[0]["lr"] = lr
        opt.step()
        if resumed:
            saved, opt = opt.state_dict(), Untuned([p])
            opt.load_state_dict(saved)
    assert len(recwarn) == count
    assert all("lr=0.0006" in str(warning.message) for warning in recwarn)


# -- numbers that are not finite -----------------------------------------------------------------


@each_path
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_parameters_that_are_not_finite_raise_and_nothing_has_moved(when):
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt, ones = Untuned([("p", p), ("q", q)]), [[torch.ones(2)] * 2]
    if when == "later":
        UNTUNED.descend(opt, [p, q], ones)
    with torch.no_grad():
        q[1] = math.nan
    if when == "later":
        UNTUNED.descend(opt, [p, q], ones)  # which finds the displacement
    before = p.detach().clone()
    with pytest.raises(FloatingPointError, match="'q'"):
        UNTUNED.descend(opt, [p, q], ones)
    assert torch.equal(p, before)


def test_no_error_without_the_check():
    p = nn.Parameter(torch.ones(2))
    opt = descend(p, [1.0, float("nan")], check_finite=False)
    opt.step()
    assert not torch.isfinite(p).all()


def test_grad_scaler_works_as_with_any_optimizer():
    # The scale is a power of two: unscaled gradients are exact.
    run, twin = Run(UNTUNED), Run(UNTUNED)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, xi in enumerate(run.problem.samples):
        run.opt.zero_grad()
        scaler.scale(run.problem.loss(run.params, xi)).backward()
        if i == 5:
            run.params[1].grad[0] = float("inf")
        scaler.step(run.opt)
        scaler.update()
    twin.train(0, 5).train(6)
    assert scaler.get_scale() == 2.0**9
    assert_same(run.everything(), twin.everything())


# -- sixteen bits --------------------------------------------------------------------------------


@each_path
def test_a_step_continues_from_half_precision_weights_that_the_user_has_changed():
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    opt = descend(p, *torch.ones(5, 3))
    with torch.no_grad():
        p[0] = -4.0
    UNTUNED.descend(opt, [p], [[torch.zeros(3, dtype=BF16)]])
    assert p[:2].tolist() == pytest.approx([-4.0, 0.9], abs=0.2)


def test_sixteen_bits_of_state_take_half_the_memory_and_cost_little():
    losses = {}
    for dtype in (None, BF16):
        run = Run(UNTUNED, 300, F32, state_dtype=dtype).train()
        run.opt.eval()
        problem, params = run.problem, run.params
        losses[dtype] = np.mean([problem.loss(params, xi).item() for xi in problem.samples])
        assert run.opt.state[params[0]]["z_minus_x"].dtype == (dtype or F32)
    assert losses[BF16] == pytest.approx(losses[None], rel=0.02)
