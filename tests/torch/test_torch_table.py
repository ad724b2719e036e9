"""torch's own table of optimizers, with rows for ours.

`torch.testing` ships the table that torch's optimizer tests run over, not the tests. The tests here
bear the names of torch's, so that a difference can be looked up, and some of torch's rows run too:
what they fail is not torch's contract. What test_contract.py covers is not repeated.
"""

import pytest
import torch
from torch import nn

import stormplus
from tests.torch.optimizers import assert_same, values

pytestmark = pytest.mark.long

PAIRED = ("StormPlus", "SimplifiedStormPlus", "Storm")
OURS = (*PAIRED, "Untuned")
THEIRS = ("Adam", "LBFGS", "RMSprop", "SGD")

DIFFERENCES = {  # on purpose; docs/deviations.md has them for users
    "test_step_is_noop_when_params_have_no_grad": PAIRED,
    "test_can_load_older_state_dict": OURS,
    "test_fused_does_not_step_if_foundinf": PAIRED,
    "test_differentiable": OURS,
    "test_capturable": OURS,
}


@pytest.fixture(params=[*OURS, *THEIRS])
def info(request):
    """One of torch's rows, or a row of torch's kind for one of ours."""
    pytest.importorskip("expecttest", reason="torch.testing needs it: pip install expecttest")
    from torch.testing._internal import common_optimizers as torchs

    name, test = request.param, request.node.originalname
    if name in DIFFERENCES.get(test, ()):
        request.applymarker(pytest.mark.xfail(strict=True, reason="see DIFFERENCES"))
    if name in THEIRS:
        return next(info for info in torchs.optim_db if info.name == name)

    def errors(device, dtype):
        found = torchs.get_error_inputs_for_all_optims(device, dtype)
        return [e for e in found if name in PAIRED or "lr" not in repr(e.optimizer_error_input)]

    return torchs.OptimizerInfo(
        getattr(stormplus, name),
        optim_inputs_func=lambda device: [],
        optim_error_inputs_func=errors,
        step_requires_closure=name in PAIRED,
    )


class Problem:
    """Least squares: a layer of 5 x 4, one batch."""

    def __init__(self, info, **options):
        torch.manual_seed(3)
        self.layer, self.rows = nn.Linear(4, 5), torch.randn(12, 4)
        self.params = list(self.layer.parameters())
        self.opt = info.optim_cls(self.params, **options)

    def closure(self):
        self.opt.zero_grad()
        loss = self.layer(self.rows).square().mean()
        loss.backward()
        return loss


def test_errors(info):
    for wrong in info.optim_error_inputs_func("cpu", torch.float32):
        asked = wrong.optimizer_error_input
        params = [nn.Parameter(torch.ones(2))] if asked.params is None else asked.params
        expects = pytest.warns if issubclass(wrong.error_type, Warning) else pytest.raises
        with expects(wrong.error_type, match=wrong.error_regex):
            info.optim_cls(params, **asked.kwargs)


def test_fused_does_not_step_if_foundinf(info):
    """`GradScaler` says that it has found an overflow, and the optimizer does nothing."""
    if info.name in THEIRS and "cpu" not in info.supports_fused_on:
        return
    problem = Problem(info, **({"fused": True} if info.name in THEIRS else {}))
    start = values(problem.params)
    problem.closure()
    problem.opt.found_inf, problem.opt.grad_scale = torch.ones(()), None
    problem.opt.step()
    assert_same(values(problem.params), start)


def test_differentiable(info):
    if "differentiable" in info.supported_impls or info.name in OURS:
        Problem(info, differentiable=True)


def test_capturable(info):
    if info.has_capturable_arg or info.name in OURS:
        Problem(info, capturable=True)


def test_step_is_noop_when_params_have_no_grad(info):
    problem = Problem(info)
    start = values(problem.params)
    problem.opt.step(lambda: torch.zeros(()))
    assert_same(values(problem.params), start)


def test_can_load_older_state_dict(info):
    """Options that came after the first version may be missing in a saved group."""
    problem = Problem(info)
    problem.opt.step(problem.closure)
    old = problem.opt.state_dict()
    for group in old["param_groups"]:
        for flag in {"foreach", "fused", "maximize", "differentiable", "capturable"} & group.keys():
            del group[flag]
    problem.opt.load_state_dict(old)
    problem.opt.step(problem.closure)
