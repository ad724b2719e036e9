"""What only Untuned does: bounded steps, two buffers, an average that comes and goes."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from stormplus import Untuned
from stormplus.torch.kernels import native, plain
from tests.support.problems_for_tests import Network
from tests.support.untuned_oracle import untuned_run
from tests.torch.optimizers import UNTUNED, Run, assert_same, noise, per_tensor, values

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def descend(p, *rows, **options):
    """Take steps of one parameter with given gradients; return the optimizer."""
    opt = Untuned([p], **options)
    UNTUNED.descend(opt, [p], [[torch.as_tensor(row, dtype=p.dtype)] for row in rows])
    return opt


def draw(*shape, seed=0):
    return noise(*shape, seed=seed, dtype=F32)


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
    """The gradients agree, so that the step size grows; the second tensor misses some."""
    shapes, steps = ((5, 3), (4, 5), (4,)), 50
    rows = [1 + 0.5 * noise(steps, *shape, seed=i) for i, shape in enumerate(shapes)]
    start = [noise(*shape, seed=9) for shape in shapes]

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


@each_path
@pytest.mark.parametrize(
    ("loss", "point", "dtype"),
    [
        (1e-6, 1.0, F64), (1e6, 1.0, F64), (1e-160, 1.0, F64), (1e160, 1.0, F64),
        (2.0**600, 1.0, F64), (1.0, 1e4, F64),
        # The squares of these gradients leave float32.
        (1e-30, 1.0, F32), (1e-20, 1.0, F32), (1e20, 1.0, F32), (1e30, 1.0, F32),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_rescaling_the_objective_changes_nothing_and_large_tensors_rescale_the_run(
    loss, point, dtype, decay
):
    problem, ends = Network(samples=30), []
    for by_loss, by_point in ((1.0, 1.0), (loss, point)):
        # Above their natural scale, where a tensor's own RMS is its scale.
        params = [nn.Parameter(3 * by_point * p.detach()) for p in problem.parameters(dtype)]
        opt = Untuned(params, weight_decay=decay)
        for xi in problem.samples:
            opt.zero_grad()
            (by_loss * problem.loss([p / (3 * by_point) for p in params], xi)).backward()
            opt.step()
        ends.append([p.detach() / by_point for p in params])
    tolerance = 1e-9 if dtype == F64 else 1e-5
    for p, q, x0 in zip(*ends, problem.x0):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert (p - 3 * torch.tensor(x0, dtype=dtype)).abs().max() > 1e-3


def test_the_scale_of_a_layer_is_its_start_or_one_over_the_root_of_its_inputs():
    # (outputs, inputs, ...): 2 x 3 x 3 inputs; a vector is one row.
    shapes = {(4, 2, 3, 3): 18**-0.5, (5, 9): 1 / 3, (16,): 0.25, (): 1.0}
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    large = nn.Parameter(torch.full((5, 9), 2.0))
    opt = Untuned([*params, large])
    UNTUNED.descend(opt, [*params, large], [[torch.ones_like(p) for p in (*params, large)]])
    torch.testing.assert_close(
        per_tensor(opt, "ceiling"), torch.tensor([*shapes.values(), 2.0], dtype=F64)
    )


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
    UNTUNED.descend(opt, params, [[torch.ones(16), g] for g in draw(30, 16, 16)])
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
def test_a_learning_rate_is_warned_of_once_and_a_schedule_is_not(name, recwarn):
    p, (lrs, count) = nn.Parameter(torch.ones(2)), LRS[name]
    p.grad, opt = torch.ones(2), Untuned([p])
    for lr in lrs:
        opt.param_groups[0]["lr"] = lr
        opt.step()
    assert len(recwarn) == count
    assert all("lr=0.0006" in str(warning.message) for warning in recwarn)


def test_a_resumed_run_at_the_end_of_its_schedule_is_not_warned_of():
    p = nn.Parameter(torch.ones(2))
    opt, resumed = descend(p, torch.ones(2)), Untuned([p])
    resumed.load_state_dict(opt.state_dict())
    resumed.param_groups[0]["lr"] = 1e-3
    resumed.step()


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


@each_path
def test_a_half_precision_weight_that_overflows_raises():
    """Its float32 master is a finite number all the while."""
    p = nn.Parameter(torch.full((4,), 65000.0, dtype=F16))
    opt = Untuned([p])
    p.grad = -torch.ones_like(p)
    for _ in range(20):
        opt.step()
        if bool(p.isinf().any()):
            break
    assert bool(opt.state[p]["master"].isfinite().all())
    before, steps = values([p]), opt.grad_evaluations
    with pytest.raises(FloatingPointError):
        opt.step()
    assert_same(values([p]), before)
    assert opt.grad_evaluations == steps


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


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_half_precision_has_a_master_so_that_small_steps_add_up(dtype):
    # Most of these steps are smaller than half a unit in the last place of p.
    g = draw(400, 50, seed=1)
    p, exact = nn.Parameter(draw(50).to(dtype)), nn.Parameter(draw(50).to(dtype).double())
    opt, twin = descend(p, *g), descend(exact, *g)
    assert opt.state[p]["master"].dtype == F32
    assert "master" not in twin.state[exact]
    torch.testing.assert_close(opt.state[p]["master"].double(), exact.detach(), rtol=0, atol=5e-3)
    assert torch.equal(p, opt.state[p]["master"].to(dtype))


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


def test_stochastic_rounding_is_right_in_the_mean():
    v = torch.full((200_000,), 1.0 + 2**-10)  # an eighth between two neighbours in bfloat16
    place = torch.arange(200_000)
    rounded, other = plain.stochastic_round(torch.stack([v, v]), 3, place)
    assert sorted(set(rounded.tolist())) == [1.0, 1.0 + 2**-7]
    share = (rounded > 1).double().mean().item()
    assert share == pytest.approx(1 / 8, abs=5 * math.sqrt(1 / 8 * 7 / 8 / 200_000))
    assert not torch.equal(other, rounded)  # each buffer has its own draws
    assert not torch.equal(plain.stochastic_round(torch.stack([v, v]), 4, place)[0], rounded)
    part = plain.stochastic_round(torch.stack([v, v])[:, 9:], 3, place[9:])[0]
    assert torch.equal(part, rounded[9:])  # a shard has the draws of the whole


def test_complex_tensors_may_have_a_state_in_bfloat16():
    """Complex numbers are stored as pairs of reals, in vectors as in matrices."""
    matrix, vector = draw(4, 3, 2), draw(5, 2, seed=1)
    ends = []
    for form in (torch.view_as_complex, torch.clone):
        params = [nn.Parameter(form(x.clone())) for x in (matrix, vector)]
        opt = Untuned(params, state_dtype=torch.bfloat16)
        for t in range(5):
            for p, x in zip(params, (matrix, vector)):
                p.grad = form(draw(*x.shape, seed=t))
            opt.step()
        reals = [torch.view_as_real(p) if p.is_complex() else p for p in values(params)]
        ends.append((reals, opt.diagnostics()))
    assert_same(*ends)


# -- the average ---------------------------------------------------------------------------------


def test_a_hook_that_swaps_the_average_in_while_saving_keeps_the_iterate():
    p = nn.Parameter(torch.ones(3))
    opt = descend(p, [1.0, 2.0, -1.0], [0.5, 1.0, 1.0], [1.0, -2.0, 1.0])
    iterate = p.detach().clone()
    opt.register_state_dict_pre_hook(lambda opt: opt.eval())
    saved = opt.state_dict()
    assert opt.at_average
    assert not torch.equal(p, iterate)
    assert_same(saved["state"][0]["iterate"], iterate)
    opt.train()
    assert_same(p.detach(), iterate)


def written(params, value):
    with torch.no_grad():
        for p in params:
            p.copy_(value(p))


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_eval_shows_the_average_and_train_brings_the_parameters_back_exactly(dtype):
    run, undisturbed = Run(UNTUNED, dtype=dtype), Run(UNTUNED, dtype=dtype).train()
    opt, params = run.opt, run.params
    for i in range(12):
        run.train(i, i + 1)
        y = values(params)
        opt.eval()
        opt.eval()
        assert opt.at_average
        for p, q in zip(params, y):
            wide = opt.state[p].get("master", q)
            average = (wide - 0.1 * opt.state[p]["z_minus_x"]).to(dtype)
            torch.testing.assert_close(p.detach(), average)
        opt.train()
        opt.train()
        assert not opt.at_average
        assert_same(values(params), y)
    assert_same(run.everything(), undisturbed.everything())


def test_a_step_without_any_gradient_changes_nothing():
    run = Run(UNTUNED).train(0, 3)
    run.opt.zero_grad()
    before = run.everything()
    run.opt.step()
    assert_same(run.everything(), before)


def test_steps_at_the_average_are_refused():
    run, calls = Run(UNTUNED).train(0, 3), []
    run.opt.eval()
    x = values(run.params)
    with pytest.raises(RuntimeError, match=r"opt.train"):
        run.opt.step(lambda: calls.append(None))
    assert not calls
    assert_same(values(run.params), x)


def test_weights_that_are_loaded_before_the_first_step_stay():
    run = Run(UNTUNED)
    before = values(run.params)
    run.opt.eval()  # as a validation before training
    assert_same(values(run.params), before)
    written(run.params, lambda p: torch.full_like(p, 2.0))
    run.opt.train()
    assert all((p == 2).all() for p in run.params)
    run.train()
    assert run.opt.state[run.params[0]]["initial_sample"].eq(2).all()


@pytest.mark.parametrize("change", [1.0, 0.0])  # the best model of a run is often the last one
def test_train_warns_if_it_overwrites_weights_that_were_loaded_at_the_average(change, recwarn):
    run = Run(UNTUNED, dtype=BF16).train(0, 3)
    x = values(run.params)
    run.opt.eval()
    written(run.params, lambda p: p + change)
    assert run.opt.overwritten == bool(change)
    run.opt.train()
    assert len(recwarn) == bool(change)
    assert_same(values(run.params), x)


@pytest.mark.parametrize("saved_at_average", [False, True])
@pytest.mark.parametrize("copied", [False, True])  # by Lightning, after loading a checkpoint
def test_a_state_that_is_loaded_at_the_average_belongs_to_the_weights_there(
    saved_at_average, copied
):
    run = Run(UNTUNED).train(0, 3)
    x, saved = values(run.params), run.opt.state_dict()
    run.opt.eval()
    run.opt.load_state_dict(run.opt.state_dict() if saved_at_average else saved)
    if copied:
        for p in run.params:
            run.opt.state[p] = copy.deepcopy(run.opt.state[p])
    written(run.params, lambda p: p + 1)
    there = values(run.params)
    run.opt.train()  # without a warning
    assert_same(values(run.params), x if saved_at_average else there)
    if saved_at_average:
        whole = Run(UNTUNED).train(0, 5)
        assert_same(run.train(3, 5).everything(), whole.everything())


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", ["nothing", "unfreeze", "double"])
def test_a_validation_in_inference_mode(steps, change):
    """Tensors that eval() creates there must be writable in later steps."""
    ends = []
    for mode in (torch.inference_mode, torch.no_grad):
        run = Run(UNTUNED, samples=8, dtype=F32)
        run.params[0].requires_grad_(change != "unfreeze")
        run.train(0, steps)
        run.params[0].requires_grad_(True)
        for p in run.params:
            p.data = p.data.to(F64 if change == "double" else F32)
        with mode():
            run.opt.eval()
            run.opt.train()
        ends.append(values(run.train(steps).params))
    assert_same(*ends)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("at_average", [True, False])
def test_weights_of_the_average_with_a_state_of_the_iterate_are_warned_of(dtype, at_average):
    run, resumed = Run(UNTUNED, dtype=dtype).train(0, 8), Run(UNTUNED, dtype=dtype)
    resumed.opt.load_state_dict(run.opt.state_dict())
    if at_average:
        run.opt.eval()
    resumed.copy_weights(run)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        resumed.train(8, 10)
    # Once, and at the line that calls step().
    expected = [UNTUNED.step.__code__.co_filename] if at_average else []
    assert [warning.filename for warning in given] == expected


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("way", ["converted", "loaded"])
def test_the_average_of_weights_that_were_wider_before(dtype, way):
    """Their float32 copy holds nothing yet."""
    p = nn.Parameter(draw(3, 4))
    opt = descend(p, *draw(20, 3, 4, seed=1))
    z_minus_x = opt.state[p]["z_minus_x"].clone()
    if way == "converted":
        p.data = p.data.to(dtype)
        opt.state_dict()
    else:
        saved, p = opt.state_dict(), nn.Parameter(p.detach().to(dtype))
        opt = Untuned([p])
        opt.load_state_dict(saved)
    y = p.detach().float()
    opt.eval()
    average = (y - 0.1 * z_minus_x).to(dtype)
    torch.testing.assert_close(p.detach(), average, rtol=0.01, atol=0.001)
    opt.train()
    assert_same(p.detach(), y.to(dtype))
