"""Untuned beyond the contract: bounded steps, two buffers, an average that comes and goes."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from checkpoint_ways import through_dcp, through_torch_save
from optimizers import CASES, assert_same, everything, made, per_tensor, values
from problems_for_tests import Network
from torch import nn
from untuned_oracle import untuned_run

from stormplus import Untuned
from stormplus.torch.kernels import native, plain

UNTUNED = CASES[-1]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def descend(p, *rows, **options):
    """Steps of one parameter with given gradients; returns the optimizer."""
    opt = Untuned([p], **options)
    UNTUNED.descend(opt, [p], [[torch.as_tensor(row, dtype=p.dtype)] for row in rows])
    return opt


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def fast_iterate(opt, p):
    return p.detach() + 0.9 * opt.state[p]["z_minus_x"]


@pytest.fixture(params=["native", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(native, "LIBRARY", None)
    elif native.LIBRARY is None:
        pytest.skip("the native passes were not built")
    return request.param


# -- the numbers ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("path")
def test_every_number_of_every_step_equals_the_oracle():
    problem = Network(samples=100)
    params = problem.parameters()
    opt = Untuned([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.3}])
    rows = untuned_run(
        lambda k, x: problem.gradient(x, problem.samples[k]), problem.x0, 100,
        weight_decay=[0.0, 0.3, 0.3],
    )  # fmt: skip
    for xi, row in zip(problem.samples, rows):
        opt.step(problem.closure(opt, params, xi))
        close(per_tensor(opt, "step_size").numpy(), row["eta"])
        close(per_tensor(opt, "distance").numpy(), row["r"])
        close(per_tensor(opt, "effective_steps").numpy(), row["effective_steps"])
        close(per_tensor(opt, "evidence").numpy(), row["evidence"])
        for i, p in enumerate(params):
            close(p.detach().numpy(), row["x"][i])
            close(fast_iterate(opt, p).numpy(), row["z"][i])
            close(opt.state[p]["grad_rms"].numpy(), row["s"][i])
    opt.eval()
    for p, average in zip(params, rows[-1]["average"]):
        close(p.detach().numpy(), average)


@pytest.mark.usefixtures("path")
def test_a_large_tensor_is_measured_on_a_sample_and_in_chunks():
    shape = (301, 250)  # 75,250 elements: three native chunks, every 17th is measured
    g, x = draw(6, *shape, dtype=torch.float64), draw(*shape, seed=1, dtype=torch.float64) / 20
    p = nn.Parameter(x.clone())
    opt = descend(p, *g)
    rows = untuned_run(lambda k, _: [g[k].numpy()], [x.numpy()], 6, sample=4096)
    assert opt.state[p]["initial_sample"].shape == (4427,)
    close(p.detach().numpy(), rows[-1]["x"][0])
    close(per_tensor(opt, "distance").numpy(), rows[-1]["r"])
    everywhere = untuned_run(lambda k, _: [g[k].numpy()], [x.numpy()], 6)
    assert rows[-1]["r"][0] == pytest.approx(everywhere[-1]["r"][0], rel=0.05)


@pytest.mark.usefixtures("path")
def test_a_half_precision_weight_that_overflows_is_told():
    """Its float32 master is a finite number all the while."""
    p = nn.Parameter(torch.full((4,), 65000.0, dtype=torch.float16))
    opt = Untuned([p])
    p.grad = -torch.ones_like(p)
    for _ in range(20):
        opt.step()
        if bool(p.isinf().any()):
            break
    assert bool(opt.state[p]["master"].isfinite().all())
    before, steps = values([p]), opt.grad_evaluations
    with pytest.raises(FloatingPointError, match="non-finite, or its distance"):
        opt.step()
    assert_same(values([p]), before)
    assert opt.grad_evaluations == steps


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


@pytest.mark.parametrize(("loss", "point"), [(1e-6, 1.0), (1e6, 1.0), (1.0, 1e4)], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_rescaling_the_objective_changes_nothing_and_large_tensors_rescale_the_run(
    loss, point, decay
):
    problem, ends = Network(samples=60), []
    for by_loss, by_point in ((1.0, 1.0), (loss, point)):
        # Above their natural scale, where a tensor's own RMS is its scale.
        params = [nn.Parameter(3 * by_point * p.detach()) for p in problem.parameters()]
        opt = Untuned(params, weight_decay=decay)
        for xi in problem.samples:
            opt.zero_grad()
            (by_loss * problem.loss([p / (3 * by_point) for p in params], xi)).backward()
            opt.step()
        ends.append([p.detach() / by_point for p in params])
    for p, q, x0 in zip(*ends, problem.x0):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
        assert (p - 3 * torch.tensor(x0)).abs().max() > 1e-3


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_float32_gradients_whose_squares_leave_float32(size):
    g, ends = draw(30, 7), []
    for scale in (1.0, size):
        p = nn.Parameter(torch.linspace(-1, 1, 7))
        descend(p, *(scale * g))
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    assert (ends[1] - torch.linspace(-1, 1, 7)).abs().min() > 1e-4


@pytest.mark.parametrize("start", [0.0, 0.5, 3.0])
def test_the_first_step_of_one_element_by_hand(start):
    # One input: the natural scale is 1, so R = max(|x_1|, 1), and the first step is R / 60 against
    # the sign of the gradient, whatever its size: u = g / s = 1, x_2 = z_2, and y is both.
    p = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    descend(p, [3.0])
    assert p.item() == pytest.approx(start - max(start, 1.0) / 60, abs=1e-15)


def test_the_scale_of_a_layer_is_its_start_or_one_over_the_root_of_its_inputs():
    # (outputs, inputs, ...): 2 x 3 x 3 inputs; a vector is one row.
    shapes = {(4, 2, 3, 3): 18**-0.5, (5, 9): 1 / 3, (16,): 0.25, (): 1.0}
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    large = nn.Parameter(torch.full((5, 9), 2.0))
    opt = Untuned([*params, large])
    UNTUNED.descend(opt, [*params, large], [[torch.ones_like(p) for p in (*params, large)]])
    torch.testing.assert_close(
        per_tensor(opt, "ceiling"), torch.tensor([*shapes.values(), 2.0], dtype=torch.float64)
    )


# -- bounded, whatever the gradients are -----------------------------------------------------------


def steps_of_z(p, rows, **options):
    """The largest step of the fast iterate in each row, and the optimizer."""
    opt, before, found = Untuned([p], **options), p.detach().clone(), []
    for row in rows:
        UNTUNED.descend(opt, [p], [[torch.as_tensor(row, dtype=p.dtype)]])
        after = fast_iterate(opt, p)
        found.append(float((after - before).abs().max()))
        before = after
    return np.array(found), opt


def test_a_constant_gradient_never_feeds_itself():
    # |z - z_1| <= 2 R sqrt(t), and R is the RMS at the start: 1.
    for dtype in (torch.float32, torch.float16):
        p = nn.Parameter(torch.ones(3, dtype=dtype))
        opt = descend(p, *torch.ones(800, 3))
        assert opt.diagnostics()["distance"] == pytest.approx(1.0, rel=1e-3)
        assert p.detach().abs().max() <= 1 + 2 * math.sqrt(800)


@pytest.mark.parametrize(
    ("noisy", "held"),
    [
        (None, False),
        ("weight", True),
        ("bias", False),  # a vector has no say
    ],
)
def test_no_step_is_larger_than_the_first_unless_the_steps_agree_in_every_matrix(noisy, held):
    params = {name: nn.Parameter(torch.zeros(64, 64)) for name in ("head", "weight")}
    params["bias"] = nn.Parameter(torch.zeros(64))
    opt = Untuned(list(params.values()))
    for row in draw(60, 64, 64):
        for name, p in params.items():
            p.grad = (
                (row if p.ndim > 1 else row[0]).clone() if name == noisy else torch.ones_like(p)
            )
        opt.step()
    sizes = per_tensor(opt, "step_size") * 60 * 8  # R = 1 / 8 for all
    # Held, or at the full r / sqrt(t): r is R in the two that go straight on.
    straight = [name != noisy for name in params]
    expected = 1.0 if held else 60 / math.sqrt(60)
    assert sizes[straight].tolist() == pytest.approx([expected] * sum(straight), rel=0.15)


def test_the_evidence_is_the_oracles_with_a_schedule_and_gradients_that_are_missing():
    """Gradients that agree, so that steps are let go; one tensor misses some of them."""
    shapes, steps = ((5, 3), (4, 5), (4,)), 50
    rows = [
        1 + 0.5 * draw(steps, *shape, dtype=torch.float64, seed=i) for i, shape in enumerate(shapes)
    ]
    start = [draw(*shape, dtype=torch.float64, seed=9) for shape in shapes]
    params = [nn.Parameter(block.clone()) for block in start]

    def gradients(k):
        return [rows[0][k], None if k % 3 == 2 or k < 4 else rows[1][k], rows[2][k]]

    expected = untuned_run(
        lambda k, _: [g if g is None else g.numpy() for g in gradients(k)],
        [block.numpy() for block in start], steps, lr=lambda moves: 1 / (1 + 0.1 * (moves % 7)),
    )  # fmt: skip
    opt = Untuned([{"params": [p]} for p in params])
    moves = [0, 0, 0]
    for k, row in enumerate(expected):
        for i, (group, g) in enumerate(zip(opt.param_groups, gradients(k))):
            group["lr"] = 1 / (1 + 0.1 * (moves[i] % 7))
            moves[i] += g is not None
        UNTUNED.descend(opt, params, [gradients(k)])
        for p, block in zip(params, row["x"]):
            close(p.detach().numpy(), block)
        close(per_tensor(opt, "evidence").numpy(), row["evidence"])
    assert (per_tensor(opt, "evidence") > 10).all()


def evidence_after(steps, params, gradient=torch.ones_like):
    """Of the optimizer, after gradients that agree."""
    opt = Untuned(params)
    for _ in range(steps):
        for p in opt.parameters():
            p.grad = gradient(p) if p.requires_grad else None
        opt.step()
    return opt, per_tensor(opt, "evidence")


def test_who_cannot_move_has_no_say():
    """A factor of 0, a tensor that is empty, one that is frozen, or was and has no gradient yet."""

    def matrices(n):
        return [nn.Parameter(torch.zeros(16, 16)) for _ in range(n)]

    _, free = evidence_after(50, matrices(2))
    first, second, still = matrices(3)
    groups = [{"params": [first, second]}, {"params": [still], "factor": 0.0}]
    _, found = evidence_after(50, groups)
    assert found[:2].tolist() == free.tolist()
    assert free[0] > 1e4

    vector, empty = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(0, 3))
    alone = evidence_after(50, [nn.Parameter(torch.zeros(16))])[1][0]
    assert evidence_after(50, [vector, empty])[1][0] == alone > 1e4

    # A matrix of noise speaks; not once it is frozen, nor unfrozen and without a gradient.
    vector, (matrix,), noise = nn.Parameter(torch.zeros(16)), matrices(1), iter(draw(30, 16, 16))
    opt, found = evidence_after(
        30, [vector, matrix], lambda p: torch.ones(16) if p.ndim == 1 else next(noise)
    )
    assert found[0] < 10
    matrix.requires_grad_(False)
    for _ in range(50):
        vector.grad = torch.ones(16)
        opt.step()
    assert per_tensor(opt, "evidence")[0] > 1e4
    matrix.requires_grad_(True)
    matrix.grad = vector.grad = None
    before = float(per_tensor(opt, "evidence")[0])
    for _ in range(3):
        vector.grad = torch.ones(16)
        opt.step()
    assert per_tensor(opt, "evidence").tolist() == [before, 0.0]  # it has a matrix to wait for


def test_gradients_of_zero_move_nothing_and_the_first_that_is_not_moves_by_r():
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = descend(p, *[[0.0, 0.0]] * 500)
    assert p.tolist() == [1.0, -2.0]
    r = opt.diagnostics()["distance"]
    UNTUNED.descend(opt, [p], [[torch.tensor([1e-3, 1e3])]])
    moved = (fast_iterate(opt, p) - torch.tensor([1.0, -2.0])).abs()
    assert (moved > 0).all()
    assert (moved <= r * 1.0001).all()


@pytest.mark.long
def test_coordinates_that_wake_once_in_a_thousand_steps():
    g = torch.zeros(2100, 4)
    g[:, 0] = draw(2100)
    g[999::1000, 1], g[500::1000, 2] = 1.0, 1e6
    sizes, opt = steps_of_z(nn.Parameter(torch.ones(4)), g)
    assert sizes.max() <= opt.diagnostics()["distance"] * 1.0001 <= 1.01
    assert (opt.parameters()[0][:3] != 1).all()
    assert opt.parameters()[0][3] == 1


@pytest.mark.long
def test_gradients_that_shrink_to_nothing():
    g = draw(1000, 4) * torch.logspace(0, -20, 1000)[:, None]
    sizes, opt = steps_of_z(nn.Parameter(torch.ones(4)), g)
    assert np.isfinite(sizes).all()
    assert sizes.max() <= opt.diagnostics()["distance"] * 1.0001


def test_parameters_that_are_all_zero_begin():
    p = nn.Parameter(torch.zeros(3, 4))
    descend(p, draw(3, 4))
    assert p.detach().abs().max() == pytest.approx(0.5 / 60)  # a sixtieth of 1 / sqrt(4)


def test_a_tensor_without_a_gradient_stands_still_and_the_others_do_not_mind():
    problem = Network(samples=20)
    params, extra = problem.parameters(), nn.Parameter(draw(3, dtype=torch.float64))
    alone, with_it = Untuned(params), None
    problem.run(alone, params)
    others = problem.parameters()
    with_it, start = Untuned([*others, extra]), extra.detach().clone()
    problem.run(with_it, others, problem.samples[:10])
    assert torch.equal(extra, start)
    extra.grad = torch.ones_like(extra)
    with_it.step(problem.closure(with_it, others, problem.samples[10]))
    assert torch.equal(extra, start)  # the closure has zeroed it
    problem.run(with_it, others, problem.samples[11:])
    assert_same(values(others), values(params))


def test_a_tensor_that_was_frozen_begins_as_if_it_were_new():
    p, q = (nn.Parameter(draw(6, seed=seed)) for seed in (1, 2))
    opt = Untuned([p, q])
    UNTUNED.descend(opt, [p, q], [[row, row] for row in draw(30, 6)])
    p.requires_grad_(False)
    UNTUNED.descend(opt, [p, q], [[None, row] for row in draw(3, 6, seed=3)])
    p.requires_grad_(True)
    fresh = nn.Parameter(p.detach().clone())
    rows = draw(5, 6, seed=4)
    UNTUNED.descend(opt, [p, q], [[row, row] for row in rows])
    descend(fresh, *rows)
    assert torch.equal(p, fresh)
    assert per_tensor(opt, "step").tolist() == [5, 38]


# -- nothing to get wrong --------------------------------------------------------------------------


def test_there_is_no_lr():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"it has no learning rate.*Leave it out.*factor"):
        Untuned([p], lr=1e-3)
    with pytest.raises(TypeError, match=r"Untuned\(\) accepts only params positionally"):
        Untuned([p], 1e-3)
    with pytest.raises(ValueError, match=r"a group of Untuned got lr=0.001.*no learning rate"):
        Untuned([{"params": [p], "lr": 1e-3}])


def test_a_group_that_comes_later_may_have_a_part_of_the_lr(recwarn):
    """As trainers unfreeze a backbone: at the lr of the rest, or a tenth of it."""
    first, second, third = (nn.Parameter(torch.ones(n)) for n in (1, 2, 3))
    opt = Untuned([first])
    opt.param_groups[0]["lr"] = 0.5  # by a schedule
    opt.add_param_group({"params": [second], "lr": opt.param_groups[0]["lr"]})
    assert not recwarn
    with pytest.warns(UserWarning, match=r"added with lr=0.05; lr is only a multiplier here"):
        opt.add_param_group({"params": [third], "lr": 0.1 * opt.param_groups[0]["lr"]})
    for p in (first, second, third):
        p.grad = torch.ones_like(p)
    opt.step()
    moved = [float((1 - p).abs().max()) for p in (first, second, third)]
    # Each by lr R / 60, with R = 1, in z; the parameters hold a tenth of that and all of x.
    assert moved[1] == pytest.approx(moved[0])
    assert moved[2] == pytest.approx(0.1 * moved[0])


def test_a_scheduler_multiplies_and_a_reset_in_its_middle_is_no_error():
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = Untuned([p])
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.5)
    UNTUNED.descend(opt, [p], [[torch.ones(2, dtype=torch.float64)]])
    assert p[0].item() == pytest.approx(1 - 0.5 / 60)
    schedule.step()
    opt.reset()
    assert opt.param_groups[0]["lr"] == 0.5


def step_with_lr(opt, lr):
    opt.param_groups[0]["lr"] = lr
    opt.step()


@pytest.fixture
def one_group():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return Untuned([p])


def test_a_learning_rate_set_in_the_loop_is_warned_of_once(one_group):
    with pytest.warns(UserWarning, match=r"lr=0.0006.*Delete the scheduler.*scale it to 1.0"):
        step_with_lr(one_group, 6e-4)
    step_with_lr(one_group, 5e-4)  # warnings are errors


@pytest.mark.parametrize("lrs", [(1.0, 1e-3, 0.0), (0.05, 0.01), (0.0, 0.5)], ids=str)
def test_a_schedule_scaled_to_one_is_not_warned_of(one_group, lrs):
    for lr in lrs:
        step_with_lr(one_group, lr)


def test_a_resumed_run_at_the_end_of_its_schedule_is_not_warned_of(one_group):
    one_group.step()
    one_group.load_state_dict(one_group.state_dict())
    step_with_lr(one_group, 1e-3)


def test_a_negative_lr_is_an_error_and_nothing_has_moved(one_group):
    with pytest.raises(ValueError, match=r"lr must be at least 0, got -0.1"):
        step_with_lr(one_group, -0.1)
    assert one_group.parameters()[0].tolist() == [1, 1]


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=str)
def test_complex_tensors_beside_a_matrix_are_pairs_of_reals(state_dtype):
    matrix, vector = draw(4, 3, 2), draw(5, 2, seed=1)
    ends = []
    for form in (torch.view_as_complex, torch.clone):
        params = [nn.Parameter(form(x.clone())) for x in (matrix, vector)]
        opt = Untuned(params, state_dtype=state_dtype)
        for t in range(5):
            for p, x in zip(params, (matrix, vector)):
                p.grad = form(draw(*x.shape, seed=t))
            opt.step()
        reals = [torch.view_as_real(p) if p.is_complex() else p for p in values(params)]
        ends.append((reals, opt.diagnostics()))
    assert_same(*ends)


def test_weight_decay_is_that_of_adamw_with_the_step_size_for_its_lr():
    # Without a gradient's push. Sixty ones: R = 1, the natural scale 1 / sqrt(60) is below it, and
    # a step takes wd * eta * natural / R off; at its natural scale a layer loses wd * eta.
    for size, start, part in ((60, 1.0, 60**-0.5), (1, 1.0, 1.0), (4, 0.5, 1.0)):
        p = nn.Parameter(torch.full((size,), start, dtype=torch.float64))
        opt = descend(p, torch.zeros(size), weight_decay=0.3)
        eta = opt.diagnostics()["step_size"]
        assert eta == pytest.approx(max(start, size**-0.5) / 60)
        assert p[0].item() == pytest.approx(start * (1 - 0.3 * eta * part), rel=1e-12)


@pytest.mark.parametrize("decay", [0.1, 1.0, 1e6])
def test_weight_decay_never_blows_up(decay):
    p = nn.Parameter(100 * draw(100))
    descend(p, *draw(200, 100, seed=1), weight_decay=decay)
    assert p.detach().abs().max() < 1000


def test_state_dtypes_that_are_not_there():
    with pytest.raises(ValueError, match=r"torch.bfloat16 or None, got torch.float16"):
        Untuned([nn.Parameter(torch.ones(2))], state_dtype=torch.float16)


@pytest.mark.usefixtures("path")
def test_parameters_that_are_not_finite_raise_and_nothing_has_moved():
    p, q = nn.Parameter(torch.tensor([1.0, math.inf])), nn.Parameter(torch.ones(2))
    opt = Untuned([("p", p), ("q", q)])
    with pytest.raises(FloatingPointError, match=r"'p'.*is not finite; nothing has moved"):
        UNTUNED.descend(opt, [p, q], [[torch.ones(2)] * 2])
    assert torch.equal(q, torch.ones(2))
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = Untuned([("p", p), ("q", q)])
    UNTUNED.descend(opt, [p, q], [[torch.ones(2)] * 2])
    with torch.no_grad():
        q[1] = math.nan
    UNTUNED.descend(opt, [p, q], [[torch.ones(2)] * 2])
    before = p.detach().clone()
    with pytest.raises(FloatingPointError, match=r"'q'.*nothing has moved: go back"):
        UNTUNED.descend(opt, [p, q], [[torch.ones(2)] * 2])
    assert torch.equal(p, before)


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


def test_no_refusal_without_the_check():
    p = nn.Parameter(torch.ones(2))
    descend(p, [1.0, float("nan")], check_finite=False)
    assert not torch.isfinite(p).all()


# -- sixteen bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_a_master_so_that_small_steps_add_up(dtype):
    # Two hundred thousand steps of this size would be lost one by one.
    g = draw(400, 50, seed=1)
    p, exact = nn.Parameter(draw(50).to(dtype)), nn.Parameter(draw(50).to(dtype).double())
    opt, twin = descend(p, *g), descend(exact, *g)
    assert opt.state[p]["master"].dtype == torch.float32
    assert "master" not in twin.state[exact]
    torch.testing.assert_close(opt.state[p]["master"].double(), exact.detach(), rtol=0, atol=5e-3)
    assert torch.equal(p, opt.state[p]["master"].to(dtype))


@pytest.mark.usefixtures("path")
def test_half_precision_that_the_user_has_changed_is_taken_as_it_is():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = descend(p, *torch.ones(5, 3))
    with torch.no_grad():
        p[0] = -4.0
    UNTUNED.descend(opt, [p], [[torch.zeros(3, dtype=torch.bfloat16)]])
    assert abs(p[0].item() + 4.0) < 0.2
    assert abs(p[1].item() - 0.9) < 0.2


def test_sixteen_bits_of_state_take_half_the_memory_and_cost_little():
    problem, losses = Network(samples=300), {}
    for dtype in (None, torch.bfloat16):
        params = problem.parameters(torch.float32)
        opt = Untuned(params, state_dtype=dtype)
        problem.run(opt, params)
        opt.eval()
        losses[dtype] = np.mean([problem.loss(params, xi).item() for xi in problem.samples])
        assert opt.state[params[0]]["z_minus_x"].dtype == (dtype or torch.float32)
    assert losses[torch.bfloat16] == pytest.approx(losses[None], rel=0.02)


def test_rounding_at_random_is_right_in_the_mean_and_leaves_other_streams_alone():
    v = torch.full((200_000,), 1.0 + 2**-10)  # an eighth between two neighbours in bfloat16
    before = torch.get_rng_state()
    place = torch.arange(200_000)
    rounded, other = plain.stochastic_round(torch.stack([v, v]), 3, place)
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(set(rounded.tolist())) == [1.0, 1.0 + 2**-7]
    share = (rounded > 1).double().mean().item()
    assert share == pytest.approx(1 / 8, abs=5 * math.sqrt(1 / 8 * 7 / 8 / 200_000))
    assert not torch.equal(other, rounded)  # each buffer has draws of its own
    assert not torch.equal(plain.stochastic_round(torch.stack([v, v]), 4, place)[0], rounded)
    part = plain.stochastic_round(torch.stack([v, v])[:, 9:], 3, place[9:])[0]
    assert torch.equal(part, rounded[9:])  # a shard has the draws of the whole


# -- the average -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eval_lends_the_average_and_train_brings_the_parameters_back_exactly(dtype):
    problem, params, opt = made(UNTUNED, dtype=dtype)
    _, others, undisturbed = made(UNTUNED, dtype=dtype)
    for xi in problem.samples:
        problem.run(opt, params, [xi])
        problem.run(undisturbed, others, [xi])
        y = values(params)
        opt.eval()
        opt.eval()
        assert opt.at_average
        for p, q in zip(params, y):
            wide = opt.state[p].get("master", q)
            torch.testing.assert_close(
                p.detach(), (wide - 0.1 * opt.state[p]["z_minus_x"]).to(dtype)
            )
        opt.train()
        opt.train()
        assert not opt.at_average
        assert_same(values(params), y)
        assert all("iterate" not in opt.state[p] for p in params)
    assert_same(everything(opt), everything(undisturbed))


def test_eval_before_the_first_step_changes_nothing():
    problem, params, opt = made(UNTUNED)
    opt.eval()
    assert opt.at_average
    assert_same(values(params), [torch.tensor(block) for block in problem.x0])
    opt.train()
    problem.run(opt, params)
    assert opt.diagnostics()["step"] == 12


def test_steps_at_the_average_are_refused():
    problem, params, opt = made(UNTUNED)
    problem.run(opt, params, problem.samples[:3])
    opt.eval()
    x, calls = values(params), []
    with pytest.raises(RuntimeError, match=r"step\(\) called in eval mode; call opt.train"):
        opt.step(lambda: calls.append(None))
    assert not calls
    assert_same(values(params), x)


def test_weights_that_are_loaded_before_the_first_step_stay():
    problem, params, opt = made(UNTUNED)
    opt.eval()  # as a validation before training
    with torch.no_grad():
        for p in params:
            p.fill_(2.0)
    opt.train()
    assert all((p == 2).all() for p in params)
    problem.run(opt, params)
    assert opt.state[params[0]]["initial_sample"].eq(2).all()


def test_the_same_weights_again_are_no_others(recwarn):
    """The best model of a run, loaded at its end, is often the last one."""
    problem, params, opt = made(UNTUNED, dtype=torch.bfloat16)
    problem.run(opt, params, problem.samples[:3])
    x = values(params)
    opt.eval()
    with torch.no_grad():
        for p in params:
            p.copy_(p.clone())
    assert not opt.overwritten
    opt.train()
    assert not recwarn
    assert_same(values(params), x)


def test_a_state_that_was_taken_before_eval_has_no_iterate():
    problem, params, opt = made(UNTUNED)
    problem.run(opt, params, problem.samples[:3])
    saved = opt.state_dict()
    opt.eval()
    opt.load_state_dict(saved)
    x = values(params)
    opt.train()  # as a loop does at the start of an epoch
    assert_same(values(params), x)


def test_weights_that_are_loaded_at_the_average_are_told(recwarn):
    problem, params, opt = made(UNTUNED)
    problem.run(opt, params, problem.samples[:3])
    x = values(params)
    opt.eval()
    opt.load_state_dict(opt.state_dict())  # a state belongs to whatever is there
    with torch.no_grad():
        params[-1].add_(1)
    opt.train()
    assert not recwarn
    opt.eval()
    with torch.no_grad():
        params[-1].add_(1)
    with pytest.warns(
        UserWarning, match=r"written to after opt.eval\(\), and opt.train\(\) overwrites"
    ):
        opt.train()
    assert_same(values(params), x)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", ["nothing", "unfreeze", "double"])
def test_a_validation_in_inference_mode(steps, change):
    """What is made there must be writable in the steps after it."""

    def run(mode):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        net[0].requires_grad_(change != "unfreeze")
        opt, xs = Untuned(net.parameters()), draw(8, 5, 4)
        for i, x in enumerate(xs):
            if i == steps:
                net.requires_grad_(True)
                net.to(torch.float64 if change == "double" else torch.float32)
                with mode():
                    assert not opt.at_average
                    opt.eval()
                    net(x.to(net[0].weight))
                    opt.train()
            opt.zero_grad()
            net(x.to(net[0].weight)).square().mean().backward()
            opt.step()
        return values(net.parameters())

    assert_same(run(torch.inference_mode), run(torch.no_grad))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_saved_at_the_average_beside_a_state_that_was_not_is_told(dtype):
    problem, params, opt = made(UNTUNED, dtype=dtype)
    problem.run(opt, params, problem.samples[:8])
    state = copy.deepcopy(opt.state_dict())
    opt.eval()
    at_average = values(params)
    for model, warned in ((at_average, True), (None, False)):
        opt.train()
        others = [nn.Parameter(p) for p in (model or values(params))]
        resumed = Untuned(others)
        resumed.load_state_dict(copy.deepcopy(state))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            problem.run(resumed, others, problem.samples[8:10])
        assert len(told) == warned, told
        if warned:
            assert "is not where this state left it: load a model" in str(told[0].message)
            assert told[0].filename == problem.run.__code__.co_filename  # of who calls step()


@pytest.mark.parametrize("ours", [None, torch.bfloat16], ids=str)
def test_a_state_of_another_dtype_is_refused(ours):
    theirs = None if ours else torch.bfloat16
    saved = made(UNTUNED, state_dtype=theirs)[2].state_dict()
    with pytest.raises(ValueError, match=f"saved with state_dtype='{theirs}', Untuned has"):
        made(UNTUNED, state_dtype=ours)[2].load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["converted", "loaded"])
def test_the_average_of_weights_that_were_wider_before(dtype, way):
    """They have no float32 copy yet that means anything."""
    x = draw(3, 4)
    p = nn.Parameter(x.clone())
    opt = descend(p, *draw(20, 3, 4, seed=1))
    lead = opt.state[p]["z_minus_x"].clone()
    if way == "converted":
        p.data = p.data.to(dtype)
        opt.state_dict()
    else:
        saved, p = opt.state_dict(), nn.Parameter(p.detach().to(dtype))
        opt = Untuned([p])
        opt.load_state_dict(saved)
    y = p.detach().float()
    opt.eval()
    torch.testing.assert_close(p.detach(), (y - 0.1 * lead).to(dtype), rtol=0.01, atol=0.001)
    opt.train()
    assert_same(p.detach(), y.to(dtype))
