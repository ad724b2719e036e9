"""The torch observer with parameters that freeze, join, decay, and with other scopes.

All on a problem without noise: every sample is the same, so that the estimator is the
gradient and every error and noise is zero.
"""

import numpy as np
import pytest

from stormplus import minimize
from stormplus.theory import Observer

torch = pytest.importorskip("torch")

from stormplus import StormPlus  # noqa: E402


def made(**options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (3, 2, 4)]
    return params, StormPlus(params, lr=0.3, **options)


def loss(params, use=(True, True, True)):
    return sum(5 * (1 - torch.cos(p)).sum() for p, used in zip(params, use) if used)


def step(opt, params, use=(True, True, True)):
    def closure():
        opt.zero_grad()
        value = loss(params, use)
        value.backward()
        return value

    opt.step(closure)


def full_grad_of(params):
    def full_grad():
        gradients = torch.autograd.grad(
            loss(params), [p for p in params if p.requires_grad], allow_unused=True
        )
        found = iter(gradients)
        return [next(found) if p.requires_grad else None for p in params]

    return full_grad


def assert_no_noise(rows):
    for row in rows:
        for name in ("true_error_sq", "true_noise_sq", "noise_sq", "error_sq", "innovation_sq"):
            assert abs(row.get(name, 0.0)) < 1e-24, (name, row)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"maximize": True}, {"weight_decay": 0.1, "maximize": True},
     {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"scope": "tensor"}, {"norm": "mean"}],
)  # fmt: skip
def test_full_gradient_is_of_what_is_minimized(options):
    params, opt = made(**options)
    observer = Observer(full_grad_of(params))
    with observer.attach(opt):
        for _ in range(5):
            step(opt, params)
    assert len(observer.rows) == 5
    assert_no_noise(observer.rows)


def test_frozen_parameters_are_left_out():
    params, opt = made()
    params[0].requires_grad_(False)
    observer = Observer(full_grad_of(params))
    with observer.attach(opt):
        for _ in range(4):
            step(opt, params)
    assert_no_noise(observer.rows)


def test_freezing_and_unfreezing_on_the_way():
    params, opt = made()
    observer = Observer(full_grad_of(params))
    with observer.attach(opt):
        for i in range(9):
            params[1].requires_grad_(not 3 <= i < 6)
            step(opt, params)
    assert_no_noise(observer.rows)


def test_parameter_that_joins_late_is_not_noise():
    params, opt = made()
    observer = Observer()
    with observer.attach(opt):
        for i in range(6):
            step(opt, params, (True, True, i >= 3))
    assert_no_noise(observer.rows)


@pytest.mark.parametrize("options", [{}, {"scope": "tensor"}, {"norm": "mean"}])
def test_norms_are_norms_for_every_scope_and_norm(options):
    params, opt = made(**options)
    x0 = [p.detach().numpy().copy() for p in params]
    reference, observer = Observer(), Observer()
    minimize(
        reference.watch(lambda x, xi: [5 * np.sin(b) for b in x]),
        x0, None, 5, lr=0.3, callback=reference, **options,
    )  # fmt: skip
    with observer.attach(opt):
        for _ in range(5):
            step(opt, params)
    true = np.sqrt(sum(float((25 * np.sin(b) ** 2).sum()) for b in x0))
    assert observer.rows[0]["grad_norm"] == pytest.approx(true)
    for name in ("grad_norm", "estimator_norm"):
        ours = [row[name] for row in observer.rows]
        np.testing.assert_allclose(ours, [row[name] for row in reference.rows], rtol=1e-10)
