"""What every torch optimizer of the package refuses, and that nothing has changed then."""

import pytest
import torch
from torch import nn

from tests.torch.optimizers import (
    Run,
    assert_same,
    every,
    noise,
    on,
    parameter,
    values,
)

# -- arguments -----------------------------------------------------------------------------------

P = [nn.Parameter(torch.ones(2))]
REFUSED = {
    "negative lr": ({"lr": -1.0}, ValueError, "-1.0"),
    "lr of nan": ({"lr": float("nan")}, ValueError, "nan"),
    "lr of a string": ({"lr": "fast"}, ValueError, "'fast'"),
    "lr of two elements": ({"lr": torch.ones(2)}, ValueError, r"\(2,\)|tensor"),
    "negative decay": ({"weight_decay": -0.1}, ValueError, "weight_decay .*-0.1"),
    "tensor decay": ({"weight_decay": torch.ones(())}, ValueError, "weight_decay"),
    "expanded": ({"params": [torch.ones(3, 1).expand(3, 4)]}, ValueError, r"\(3, 4\)"),
    "conjugate": ({"params": [torch.ones(2, dtype=torch.cfloat).conj()]}, ValueError, r"\(2,\)"),
    "sparse": ({"params": [torch.ones(2, 2).to_sparse()]}, TypeError, "torch.sparse_coo"),
    "integers": ({"params": [torch.ones(2, dtype=torch.long)]}, TypeError, "torch.int64"),
    "no parameters": ({"params": []}, ValueError, "parameter"),
    "an empty group": ({"params": [{"params": []}]}, ValueError, "parameter"),
    "lr of a group": ({"params": [{"params": P, "lr": -2.0}]}, ValueError, "-2.0"),
    "unknown option": ({"weight_decoy": 0.9}, TypeError, "'weight_decoy'"),
}


@every
@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments(case, name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        case(**{"params": P} | options)


def negative_lr(opt, p):
    opt.param_groups[1]["lr"] = -0.1


def sparse_gradient(opt, p):
    p.grad = torch.ones_like(p).to_sparse()


def resized(opt, p):
    p.data, p.grad = torch.ones(5, dtype=p.dtype), torch.ones(5, dtype=p.dtype)


def stale_gradient(opt, p):
    p.data = torch.ones(5, dtype=p.dtype)


def emptied_state(opt, p):
    opt.state.clear()


BAD_STEPS = {
    negative_lr: (ValueError, "lr .*-0.1"),
    sparse_gradient: (RuntimeError, "parameter 0 of group 0"),
    resized: (ValueError, "resized"),
    stale_gradient: (RuntimeError, "parameter 0 of group 0"),
    emptied_state: (RuntimeError, r"opt.reset\(\)"),
}


@every
@pytest.mark.parametrize("change", BAD_STEPS, ids=lambda change: change.__name__)
def test_a_step_that_cannot_be_taken_moves_nothing_until_a_reset(case, change):
    p, q = parameter(1.0, 2.0, 3.0), parameter(4.0)
    opt, (error, message) = case([{"params": [p]}, {"params": [q]}]), BAD_STEPS[change]
    case.descend(opt, [p, q], [[g, g[:1]] for g in noise(4, 3)])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    change(opt, p)
    held = values([p, q])
    with pytest.raises(error, match=message):
        case.step(opt, lambda: None)
    assert_same(values([p, q]), held)
    opt.param_groups[1]["lr"] = 1.0
    opt.reset()
    case.descend(opt, [p, q], [[g[: len(p)], g[:1]] for g in noise(3, 5)])
    assert all(bool((a != b).all()) for a, b in zip((p, q), held))


@every
def test_a_refused_group_and_a_refused_reset_change_nothing(case):
    run = Run(case).train(0, 2)
    before, name = run.everything(), "lr" if case.paired else "factor"
    with pytest.raises(ValueError, match="-1"):
        run.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: -1.0})
    run.opt.param_groups[0]["weight_decay"] = -1.0
    with pytest.raises(ValueError, match="weight_decay"):
        run.opt.reset()
    assert_same(run.everything(), before)


# -- gradients that are not finite ---------------------------------------------------------------


@every
@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
@pytest.mark.parametrize(("when", "named"), [(0, False), (7, True)])
def test_a_gradient_that_is_not_finite_raises_and_nothing_has_changed(case, bad, when, named):
    options = {"weight_decay": 0.1} | ({"unit": "first"} if case.paired else {})
    run, twin = (Run(case, named=named, **options) for _ in range(2))
    events, name = [], r" \('c'\)" if named else r", shape \(3, 5\)"
    run.opt.register_pass_hook(lambda _, event: events.append(event))
    run.train(0, when)
    before = run.everything()

    def evaluate():
        run.closure(when)()
        run.params[2].grad.view(-1)[1] = bad

    with pytest.raises(FloatingPointError, match=f"parameter 2 of group 0{name}"):
        case.step(run.opt, evaluate)
    assert events[-1] == "failed"
    if not (case.paired and when == 0):  # where d is overwritten, before there is any
        assert_same(run.everything(), before)
    run.train(when + 1)
    twin.train(0, when).train(when + 1)
    assert run.opt.diagnostics() == twin.opt.diagnostics()
    assert_same(run.everything(), twin.everything())


@every
def test_one_bad_gradient_among_tensors_of_any_layout_is_found(case):
    p, q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 8)[:, :4])
    opt = case([p, q])
    for _ in range(3):
        case.step(opt, on(opt, lambda: (p * p).sum() + (q * q).sum()))
    held = q.detach().clone()
    with pytest.raises(FloatingPointError, match="parameter 1"):
        case.step(opt, on(opt, lambda: (p * p).sum() + float("nan") * q.sum()))
    assert torch.equal(q, held)
