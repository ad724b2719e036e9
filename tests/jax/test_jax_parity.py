"""The same numbers as the NumPy reference and as torch."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
from jax_problems import METHODS, Regression, assert_trees_close, run, step_of

from stormplus import minimize

STEPS = 200


@pytest.fixture
def problem():
    return Regression()


def draws(problem, seed=3):
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.stack([problem.sample(rng) for _ in range(STEPS)]))


def reference(problem, x0=None, grad=None, **options):
    return minimize(
        grad or problem.numpy_grad,
        problem.x0 if x0 is None else x0,
        problem.sample,
        STEPS,
        rng=3,
        **options,
    )


def assert_equals_reference(params, state, result, rtol=1e-10):
    assert_trees_close(params, result.x, rtol=rtol)
    assert_trees_close(state.estimator, result.estimator, rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(state.gain, result.gain, rtol=rtol)
    np.testing.assert_allclose(state.step_size, result.step_size, rtol=rtol)
    np.testing.assert_allclose(state.sum_g_sq.total, result.sum_g_sq, rtol=rtol)
    np.testing.assert_allclose(state.sum_d_sq_over_a.total, result.sum_d_sq_over_a, rtol=rtol)
    assert int(state.step) == STEPS
    assert int(state.moves) == STEPS - 1


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("norm", ["raw", "mean"])
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_reference_over_200_steps(problem, method, norm, scope):
    # "mean" makes |.|^2 small and so the steps large: a smaller lr keeps the path from
    # being chaotic, which would amplify rounding.
    lr = 1.0 if norm == "raw" else 0.05
    tx = METHODS[method](lr, norm=norm, scope=scope)
    params, state = run(tx, problem.grad, problem.params(), draws(problem))
    result = reference(problem, method=method, norm=norm, scope=scope, lr=lr)
    assert_equals_reference(params, state, result)
    assert float(np.max(np.abs(result.x[0] - problem.x0[0]))) > 1e-2  # it went somewhere


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("norm", ["raw", "mean"])
@pytest.mark.parametrize("method", METHODS)
def test_a_group_equals_one_block_of_the_reference(problem, method, norm):
    """Leaves of one label are to the rules what one longer block is."""
    lr = 1.0 if norm == "raw" else 0.05
    tx = METHODS[method](lr, norm=norm, scope="group", groups=["first", "first", "second"])
    params, state = run(tx, problem.grad, problem.params(), draws(problem))

    def split(blocks):
        return [blocks[0][:30].reshape(5, 6), blocks[0][30:], blocks[1]]

    def joined(blocks):
        return [np.concatenate([np.ravel(blocks[0]), blocks[1]]), np.asarray(blocks[2])]

    result = reference(
        problem,
        x0=joined(problem.x0),
        grad=lambda x, rows: joined(problem.numpy_grad(split(x), rows)),
        method=method,
        norm=norm,
        scope="group",
        lr=lr,
    )
    result.x, result.estimator = split(result.x), split(result.estimator)
    assert state.gain.shape == (2,)
    assert_equals_reference(params, state, result)


@pytest.mark.usefixtures("x64")
def test_a_schedule_is_evaluated_at_the_move(problem):
    """`lr(0)` at the first move; the reference counts from 1."""
    tx = METHODS["storm+"](lambda count: 0.5 / (1 + 0.1 * count))
    params, state = run(tx, problem.grad, problem.params(), draws(problem))
    result = reference(problem, lr=lambda t: 0.5 / (1 + 0.1 * (t - 1)))
    assert_equals_reference(params, state, result)


@pytest.mark.usefixtures("x64")
def test_storm_constants_reach_the_rule(problem):
    constants = {"theta": 0.3, "w": 0.7, "c": 5.0, "smoothness": 1.5}
    params, state = run(
        METHODS["storm"](**constants), problem.grad, problem.params(), draws(problem)
    )
    result = reference(problem, method="storm", **constants)
    assert_equals_reference(params, state, result)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("maximize", [False, True])
def test_l2_weight_decay_is_part_of_the_objective(problem, maximize):
    """Torch's sign rule with maximize: -g + weight_decay x."""
    sign = -1 if maximize else 1

    def ascent_of(x, rows):
        return jax.tree.map(lambda g: sign * g, problem.grad(x, rows))

    tx = METHODS["storm+"](weight_decay=0.03, maximize=maximize)
    params, state = run(tx, ascent_of, problem.params(), draws(problem))
    result = reference(
        problem,
        grad=lambda x, rows: [g + 0.03 * b for g, b in zip(problem.numpy_grad(x, rows), x)],
    )
    assert_equals_reference(params, state, result)


@pytest.mark.usefixtures("x64")
def test_decoupled_weight_decay_shrinks_at_the_move_only(problem):
    tx = METHODS["storm+"](0.5, weight_decay=0.1, decoupled_weight_decay=True)
    step = step_of(tx, problem.grad)
    params, state = problem.params(), tx.init(problem.params())
    samples = draws(problem)
    params, state = step(params, state, samples[0])
    assert_trees_close(params, problem.x0, rtol=0)
    eta, d = state.step_size, state.estimator
    moved, after = step(params, state, samples[1])
    expected = [x - 0.5 * eta * (d_i + 0.1 * x) for x, d_i in zip(params, d)]
    assert_trees_close(moved, expected, rtol=1e-12)
    g = problem.grad(moved, samples[1])  # no decay in it, nor in the norm
    np.testing.assert_allclose(
        after.sum_g_sq.total - state.sum_g_sq.total,
        sum(float(jnp.vdot(g_i, g_i)) for g_i in g),
        rtol=1e-12,
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("norm", "scope"), [("raw", "global"), ("mean", "tensor")])
@pytest.mark.parametrize("method", METHODS)
def test_equals_torch(problem, method, norm, scope):
    torch = pytest.importorskip("torch")
    import stormplus

    names = {
        "storm+": "StormPlus",
        "simplified-storm+": "SimplifiedStormPlus",
        "storm": "Storm",
    }
    samples, lr = draws(problem), 0.05
    inputs, targets = torch.as_tensor(problem.inputs), torch.as_tensor(problem.targets)
    weights = [torch.tensor(block, requires_grad=True) for block in problem.x0]
    options = {"norm": norm, "scope": scope, "weight_decay": 0.01}
    opt = getattr(stormplus, names[method])(weights, lr, **options)
    for rows in torch.tensor(np.array(samples)):

        def closure(rows=rows):
            opt.zero_grad()
            hidden = torch.tanh(inputs[rows] @ weights[0] + weights[1])
            loss = torch.mean((hidden @ weights[2] - targets[rows]) ** 2)
            loss.backward()
            return loss

        opt.step(closure)
    tx = METHODS[method](lr, **options)
    params, _ = run(tx, problem.grad, problem.params(), samples)
    assert_trees_close(params, [w.detach().numpy() for w in weights], rtol=1e-10)
