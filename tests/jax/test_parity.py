"""The same numbers as the oracles over 200 steps, and the same rounding as torch."""

import jax.numpy as jnp
import numpy as np
import pytest

from stormplus.jax import averaged
from stormplus.untuned_rule import INTERPOLATION
from tests.jax.jax_problems import (
    PAIRED,
    REFERENCE,
    TRANSFORMATIONS,
    Regression,
    assert_trees_close,
    run,
)
from tests.support.oracle import Group, algorithm_1
from tests.support.untuned_oracle import untuned_run

pytestmark = pytest.mark.usefixtures("x64")

STEPS = 200
PROBLEM = Regression()
ROWS = np.random.default_rng(3).integers(64, size=(STEPS, 4))
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def end(name, sign=1, **options):
    tx = TRANSFORMATIONS[name](**options)
    return run(
        tx,
        lambda params, rows: [sign * g for g in PROBLEM.grad(params, rows)],
        PROBLEM.params(),
        jnp.asarray(ROWS),
    )


def schedule(count):
    return 0.5 / (1 + 0.1 * count)


PAIRS = {
    "default": {},
    "unit": {"unit": 0.3},
    "schedule, L2, maximize": {"lr": schedule, "weight_decay": 0.03, "maximize": True},
    "decoupled": {"lr": 0.5, "weight_decay": 0.1, "decoupled_weight_decay": True},
}
CONSTANTS = {"storm": {"theta": 0.3, "w": 0.7, "c": 5.0, "smoothness": 1.5}}


@pytest.mark.parametrize("options", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_equal_the_oracle(name, options):
    sign = -1 if options.get("maximize") else 1
    constants = CONSTANTS.get(name, {})
    params, state = end(name, sign=sign, **options, **constants)
    lr = options.get("lr", 1.0)
    # The oracle counts moves from 1.
    lr = (lambda move: schedule(move - 1)) if callable(lr) else lr
    expected = algorithm_1(
        lambda x, rows: [sign * g for g in PROBLEM.numpy_grad(x, rows)],
        [Group(PROBLEM.x0, lr, options.get("weight_decay", 0.0))],
        ROWS,
        method=REFERENCE[name],
        unit=options.get("unit", 1.0),
        decoupled=options.get("decoupled_weight_decay", False),
        maximize=options.get("maximize", False),
        **constants,
    )
    assert_trees_close(params, expected.x[-1], **CLOSE)
    assert_trees_close(state.estimator, expected.d[-1], **CLOSE)
    np.testing.assert_allclose(state.gain, expected.gain[-1], **CLOSE)
    np.testing.assert_allclose(state.step_size, expected.step_size[-1], **CLOSE)
    assert (int(state.step), int(state.moves)) == (STEPS, STEPS - 1)
    assert float(np.max(np.abs(params[0] - PROBLEM.x0[0]))) > 1e-2  # it went somewhere


UNTUNED = {
    "default": {},
    "weight decay, maximize": {"weight_decay": 0.3, "maximize": True},
    "schedule, weight decay": {"factor": schedule, "weight_decay": 0.1},
}


@pytest.mark.parametrize("options", UNTUNED.values(), ids=UNTUNED)
def test_untuned_equals_the_oracle(options):
    sign = -1 if options.get("maximize") else 1
    params, state = end("untuned", sign=sign, **options)
    rows = untuned_run(
        lambda k, x: [sign * g for g in PROBLEM.numpy_grad(x, ROWS[k])],
        PROBLEM.x0,
        STEPS,
        inputs_last=True,
        **{"lr" if k == "factor" else k: v for k, v in options.items()},
    )
    expected = rows[-1]
    assert_trees_close(params, expected["x"], **CLOSE)
    z = [y + INTERPOLATION * e for y, e in zip(params, state.z_minus_x)]
    assert_trees_close(z, expected["z"], **CLOSE)
    assert_trees_close(state.grad_rms, expected["s"], **CLOSE)
    assert_trees_close(averaged(state, params), expected["average"], **CLOSE)
    np.testing.assert_allclose(state.distance, expected["r"], **CLOSE)
    np.testing.assert_allclose(state.step_size, expected["eta"], **CLOSE)
    np.testing.assert_allclose(state.evidence, expected["evidence"], **CLOSE)
    effective_steps = state.effective_steps.total
    np.testing.assert_allclose(effective_steps, expected["effective_steps"], **CLOSE)
    assert int(state.step) == STEPS
    moved = [float(np.max(np.abs(a - b))) for a, b in zip(expected["x"], PROBLEM.x0)]
    assert min(moved) > 1e-3  # it went somewhere


def test_stochastic_rounding_is_that_of_torch():
    """Bit by bit where both compute equal numbers: after the first step s is |g|, rounded."""
    torch = pytest.importorskip("torch")
    from stormplus import Untuned

    g = np.random.default_rng(0).standard_normal((7, 11, 7)).astype(np.float32)
    g[0, 0, :4] = [0.0, -0.0, 1e-30, 3e38]
    p = torch.nn.Parameter(torch.zeros(g.shape))
    opt = Untuned([p], state_dtype=torch.bfloat16)
    p.grad = torch.tensor(g)
    tx = TRANSFORMATIONS["untuned"](state_dtype=jnp.bfloat16)
    x = jnp.zeros(g.shape, jnp.float32)
    state = tx.init(x)
    for step in range(3):
        opt.step()
        updates, state = tx.update(jnp.asarray(g), state, x)
        x = x + updates
        for buffer in ("grad_rms", "z_minus_x"):
            ours = np.asarray(getattr(state, buffer), np.float32)
            same = ours == opt.state[p][buffer].float().numpy()
            # One last digit of float32 decides now and then which way a number is rounded.
            assert same.mean() >= (0.99 if step else 1)
    np.testing.assert_allclose(np.asarray(state.grad_rms, np.float32), np.abs(g), rtol=2**-6)
    assert float(jnp.mean(state.z_minus_x != 0)) > 0.99
