"""The same numbers as the NumPy reference, the oracles and torch, over 200 steps."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax.numpy as jnp
from jax_problems import (
    PAIRED,
    REFERENCE,
    TRANSFORMATIONS,
    Regression,
    assert_trees_close,
    over,
    run,
)
from oracle import Group, algorithm_1
from untuned_oracle import untuned_run

from stormplus import minimize
from stormplus.jax import averaged
from stormplus.jax._untuned_leaf import stochastic_round
from stormplus.untuned_rule import INTERPOLATION

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


@pytest.mark.parametrize("unit", [1.0, 0.3])
@over(PAIRED)
def test_pairs_equal_the_reference(name, unit):
    """With a unit, the reference minimizes the loss divided by it."""
    params, state = end(name, unit=unit)
    rows = iter(ROWS)
    result = minimize(
        lambda x, rows: [g / unit for g in PROBLEM.numpy_grad(x, rows)],
        PROBLEM.x0,
        lambda rng: next(rows),
        STEPS,
        method=REFERENCE[name],
    )
    assert_trees_close(params, result.x, **CLOSE)
    assert_trees_close([d / unit for d in state.estimator], result.estimator, **CLOSE)
    np.testing.assert_allclose(state.gain, result.gain, **CLOSE)
    np.testing.assert_allclose(state.step_size, result.step_size, **CLOSE)
    np.testing.assert_allclose(state.sum_g_sq.total, result.sum_g_sq, **CLOSE)
    np.testing.assert_allclose(state.sum_d_sq_over_a.total, result.sum_d_sq_over_a, **CLOSE)
    assert (int(state.step), int(state.moves)) == (STEPS, STEPS - 1)
    assert float(np.max(np.abs(params[0] - PROBLEM.x0[0]))) > 1e-2  # it went somewhere


def schedule(count):
    return 0.5 / (1 + 0.1 * count)


ORACLE = {
    "schedule": ("storm_plus", {"lr": schedule}, {}),
    "constants": ("storm", {}, {"theta": 0.3, "w": 0.7, "c": 5.0, "smoothness": 1.5}),
    "L2, maximize": ("storm_plus", {"weight_decay": 0.03, "maximize": True}, {}),
    "decoupled": (
        "simplified_storm_plus",
        {"lr": 0.5, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {},
    ),
}


@pytest.mark.parametrize(("name", "options", "constants"), ORACLE.values(), ids=ORACLE)
def test_pairs_equal_the_oracle(name, options, constants):
    maximize = options.get("maximize", False)
    sign = -1 if maximize else 1
    params, state = end(name, sign=sign, **options, **constants)
    lr = options.get("lr", 1.0)
    # The oracle counts moves from 1.
    lr = (lambda move: schedule(move - 1)) if callable(lr) else lr
    expected = algorithm_1(
        lambda x, rows: [sign * g for g in PROBLEM.numpy_grad(x, rows)],
        [Group(PROBLEM.x0, lr, options.get("weight_decay", 0.0))],
        ROWS,
        method=REFERENCE[name],
        decoupled=options.get("decoupled_weight_decay", False),
        maximize=maximize,
        **constants,
    )
    assert_trees_close(params, expected.x[-1], **CLOSE)
    assert_trees_close(state.estimator, expected.d[-1], **CLOSE)
    np.testing.assert_allclose(state.gain, expected.gain[-1], **CLOSE)
    np.testing.assert_allclose(state.step_size, expected.step_size[-1], **CLOSE)


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


TORCH = {
    "storm_plus": ("StormPlus", {"lr": 0.05}),
    "simplified_storm_plus": ("SimplifiedStormPlus", {"lr": 0.05}),
    "storm": ("Storm", {"lr": 0.05}),
    "untuned": ("Untuned", {}),
}


@pytest.mark.parametrize("name", TORCH)
def test_equals_torch(name):
    torch = pytest.importorskip("torch")
    import stormplus

    theirs, options = TORCH[name]
    options = options | {"weight_decay": 0.01}
    inputs, targets = torch.as_tensor(PROBLEM.inputs), torch.as_tensor(PROBLEM.targets)
    # A matrix of torch is (outputs, inputs).
    w1, b1, w2 = PROBLEM.x0
    weights = [torch.tensor(block, requires_grad=True) for block in (w1.T.copy(), b1, w2)]
    opt = getattr(stormplus, theirs)(weights, **options)
    for rows in torch.tensor(ROWS):

        def closure(rows=rows):
            opt.zero_grad()
            hidden = torch.tanh(inputs[rows] @ weights[0].T + weights[1])
            loss = torch.mean((hidden @ weights[2] - targets[rows]) ** 2)
            loss.backward()
            return loss

        opt.step(closure)
    params, _ = end(name, **options)
    theirs = [w.detach().numpy() for w in weights]
    assert_trees_close(params, [theirs[0].T, *theirs[1:]], rtol=1e-10)


def test_sixteen_bits_are_those_of_torch():
    """Parameters and buffers in bfloat16: the rounding, too, is the same in both."""
    torch = pytest.importorskip("torch")
    from stormplus import Untuned

    rng = np.random.default_rng(0)
    x1, grads = rng.standard_normal(50).astype(np.float32), rng.standard_normal((30, 50))
    p = torch.nn.Parameter(torch.tensor(x1).bfloat16())
    opt = Untuned([p], state_dtype=torch.bfloat16, weight_decay=0.1)
    for g in grads:
        p.grad = torch.tensor(g).bfloat16()
        opt.step()
    tx = TRANSFORMATIONS["untuned"](state_dtype=jnp.bfloat16, weight_decay=0.1)
    x, state = run(
        tx, lambda x, g: g, jnp.asarray(x1, jnp.bfloat16), jnp.asarray(grads, jnp.bfloat16)
    )
    theirs = opt.state[p]
    for ours, kept in (
        (x, p),
        (state.z_minus_x, theirs["z_minus_x"]),
        (state.grad_rms, theirs["grad_rms"]),
        (state.master, theirs["master"]),
    ):
        other = kept.detach().float().numpy()
        np.testing.assert_allclose(np.asarray(ours, np.float32), other, rtol=0.05, atol=1e-3)
        # One last digit of float32 decides now and then which way a number is rounded.
        same = np.isclose(np.asarray(ours, np.float32), other, rtol=1e-5, atol=1e-7)
        assert same.mean() > 0.9


@pytest.mark.long
def test_stochastic_rounding_is_that_of_torch():
    """Bit by bit: after the first step s is |g|, rounded."""
    torch = pytest.importorskip("torch")
    from stormplus import Untuned

    g = np.random.default_rng(0).standard_normal((7, 11, 13)).astype(np.float32)
    g[0, 0, :4] = [0.0, -0.0, 1e-30, 3e38]
    p = torch.nn.Parameter(torch.zeros(g.shape))
    opt = Untuned([p], state_dtype=torch.bfloat16)
    p.grad = torch.tensor(g)
    opt.step()
    tx = TRANSFORMATIONS["untuned"](state_dtype=jnp.bfloat16)
    x1 = jnp.zeros(g.shape, jnp.float32)
    _, state = tx.update(jnp.asarray(g), tx.init(x1), x1)
    ours = np.asarray(state.grad_rms, np.float32)
    np.testing.assert_array_equal(ours, opt.state[p]["grad_rms"].float().numpy())
    np.testing.assert_allclose(ours, np.abs(g), rtol=2**-7)


def test_stochastic_rounding_by_hand():
    """Add 16 random bits below the last digit of bfloat16, and truncate."""

    def mix(n):
        n = ((n ^ (n >> 16)) * 0x21F0AAAD) % 2**32
        n = ((n ^ (n >> 15)) * 0x735A2D97) % 2**32
        return n ^ (n >> 15)

    v = np.random.default_rng(0).standard_normal((7, 11, 13)).astype(np.float32)
    v[0, 0, :3] = [0.0, -0.0, 3e38]
    bits = v.view(np.uint32).ravel().tolist()
    for t, which in ((1, 0), (2**31 - 1, 1)):
        key = mix((2 * t + which) % 2**32)
        expected = [(b + mix(mix(i) ^ key) % 2**16) >> 16 << 16 for i, b in enumerate(bits)]
        expected = np.array(expected, np.uint32).view(np.float32).reshape(v.shape)
        ours = stochastic_round(jnp.asarray(v), jnp.int32(t), which)
        np.testing.assert_array_equal(np.asarray(ours, np.float32), expected)
