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
    run,
)
from oracle import Group, algorithm_1
from untuned_oracle import untuned_run

from stormplus import minimize
from stormplus.jax import averaged
from stormplus.jax.untuned import _rounded_at_random
from stormplus.rules import INTERPOLATION

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


# The scopes, and how the reference has the blocks that share their sums: as one block.
SCOPES = {
    "global": ({}, "global"),
    "tensor": ({"scope": "tensor"}, "tensor"),
    "group": ({"scope": "group", "groups": ["first", "first", "second"]}, "group"),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("norm", ["raw", "mean"])
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_equal_the_reference(name, norm, scope):
    # "mean" makes |.|^2 small and so the steps large: a smaller lr keeps the path from
    # being chaotic, which would amplify rounding.
    lr = 1.0 if norm == "raw" else 0.05
    options, theirs = SCOPES[scope]
    params, state = end(name, lr=lr, norm=norm, **options)

    def split(blocks):
        if scope != "group":
            return blocks
        return [blocks[0][:30].reshape(5, 6), blocks[0][30:], blocks[1]]

    def joined(blocks):
        if scope != "group":
            return blocks
        return [np.concatenate([np.ravel(blocks[0]), blocks[1]]), blocks[2]]

    rows = iter(ROWS)
    result = minimize(
        lambda x, xi: joined(PROBLEM.numpy_grad(split(x), xi)),
        joined(PROBLEM.x0),
        lambda rng: next(rows),
        STEPS,
        method=REFERENCE[name],
        norm=norm,
        scope=theirs,
        lr=lr,
    )
    assert_trees_close(params, split(result.x), **CLOSE)
    assert_trees_close(state.estimator, split(result.estimator), **CLOSE)
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
    "L2, maximize": (
        "storm_plus",
        {"weight_decay": 0.03, "maximize": True, "scope": "tensor"},
        {},
    ),
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
        scope=options.get("scope", "global"),
        decoupled=options.get("decoupled_weight_decay", False),
        maximize=maximize,
        **constants,
    )
    assert_trees_close(params, expected.x[-1], **CLOSE)
    assert_trees_close(state.estimator, expected.d[-1], **CLOSE)
    for number, theirs in ((state.gain, expected.gain), (state.step_size, expected.step_size)):
        np.testing.assert_allclose(np.atleast_1d(number), list(theirs[-1].values()), **CLOSE)


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
    z = [x + INTERPOLATION * lead for x, lead in zip(params, state.lead)]
    assert_trees_close(z, expected["z"], **CLOSE)
    assert_trees_close(state.unit, expected["s"], **CLOSE)
    assert_trees_close(averaged(state, params), expected["average"], **CLOSE)
    np.testing.assert_allclose(state.distance, expected["r"], **CLOSE)
    np.testing.assert_allclose(state.step_size, expected["eta"], **CLOSE)
    np.testing.assert_allclose(state.counted.total, expected["counted"], **CLOSE)
    assert int(state.step) == STEPS
    moved = [float(np.max(np.abs(a - b))) for a, b in zip(expected["x"], PROBLEM.x0)]
    assert min(moved) > 1e-3  # it went somewhere


TORCH = {
    "storm_plus": ("StormPlus", {"lr": 0.05, "norm": "mean", "scope": "tensor"}),
    "simplified_storm_plus": ("SimplifiedStormPlus", {"lr": 0.05}),
    "storm": ("Storm", {"lr": 0.05, "norm": "mean"}),
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
        (state.lead, theirs["lead"]),
        (state.unit, theirs["unit"]),
        (state.master, theirs["master"]),
    ):
        other = kept.detach().float().numpy()
        np.testing.assert_allclose(np.asarray(ours, np.float32), other, rtol=0.05, atol=1e-3)
        # One last digit of float32 decides now and then which way a number is rounded.
        same = np.isclose(np.asarray(ours, np.float32), other, rtol=1e-5, atol=1e-7)
        assert same.mean() > 0.9


def test_rounding_at_random_is_that_of_torch():
    torch = pytest.importorskip("torch")
    from stormplus.torch import untuned as theirs

    v = np.random.default_rng(0).standard_normal((7, 11, 13)).astype(np.float32)
    v[0, 0, :3] = [0.0, -0.0, 3e38]
    for t, which in ((1, 0), (2**31 - 1, 1)):
        ours = _rounded_at_random(jnp.asarray(v), jnp.int32(t), which)
        other = theirs._rounded_at_random(torch.tensor(v), t, 0, which)
        np.testing.assert_array_equal(np.asarray(ours, np.float32), other.float().numpy())
