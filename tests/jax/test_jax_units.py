"""STORM+ in measured units: its numbers."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax_problems import (
    Regression,
    assert_trees_close,
    assert_trees_equal,
    run,
)
from jax_units import (
    MODES,
    PARAMS,
    ROWS,
    STEPS,
    parts,
    train,
    walk,
)
from units_oracle import units_run

from stormplus.jax import averaged, storm_plus, untuned, verify

# --- the numbers of the reference ------------------------------------------------------------


CASES = {
    "default": {},
    "L2, maximize": {"weight_decay": 0.03, "maximize": True, "scope": "tensor"},
    "group, mean, decoupled": {
        "scope": "group",
        "groups": ["first", "first", "second"],
        "norm": "mean",
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "lr": 0.5,
    },
    "fixed": {"distance": 0.02, "gradient": 0.7, "scope": "tensor"},
}
LONG_CASES = {
    "tensor": {"scope": "tensor"},
    "mean": {"norm": "mean", "lr": 0.3},
    "distance": {"distance": 0.02, "scope": "tensor"},
    "gradient": {"gradient": 0.7, "lr": 0.5},
}
BOTH = [
    *(pytest.param(options, id=name) for name, options in CASES.items()),
    *(pytest.param(o, id=name, marks=pytest.mark.long) for name, o in LONG_CASES.items()),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", BOTH)
@MODES
def test_equals_the_reference_over_200_steps(correction, options):
    problem = Regression()
    sign = -1 if options.get("maximize") else 1
    tx = untuned(correction=correction, **options)
    samples = jnp.asarray(ROWS)

    def grad(params, rows):
        return [sign * g for g in problem.grad(params, rows)]

    params, state = train(correction, tx, grad, problem.params(), samples)
    told = {
        "decoupled" if key == "decoupled_weight_decay" else key: value
        for key, value in options.items()
        if key != "groups"
    }
    if "groups" in options:
        told["scope"] = options["groups"]
    rows = units_run(
        lambda k, x, which: [sign * g for g in problem.numpy_grad(x, ROWS[k])],
        problem.x0,
        STEPS,
        correction=correction,
        **told,
    )
    end, (storm, units) = rows[-1], parts(correction, state)
    close = {"rtol": 1e-10, "atol": 1e-13}
    assert_trees_close(params, end["x"], **close)
    assert_trees_close(storm.estimator, end["d"], **close)
    assert_trees_close(averaged(state, params), end["average"], **close)
    numbers = {"a": storm.gain, "eta": storm.step_size, "r": units.distance}
    if correction:
        numbers["s"] = units.gradient_unit
    for key, number in numbers.items():
        expected = np.broadcast_to(end[key], end["r"].shape)
        np.testing.assert_allclose(number, expected.reshape(number.shape), **close)
    if not correction and "gradient" not in options:
        assert_trees_close(units.gradient_unit, end["s"], **close)
    assert int(storm.step) == STEPS
    assert int(storm.moves) == STEPS - correction
    moved = [float(np.max(np.abs(a - b))) for a, b in zip(end["x"], problem.x0)]
    assert min(moved) > 1e-2  # it went somewhere


@pytest.mark.usefixtures("x64")
@MODES
def test_a_schedule_is_evaluated_at_the_move(correction):
    """`lr(0)` at the first move; a call without effect does not count."""
    problem = Regression()

    def schedule(count):
        return 0.5 / (1 + 0.1 * count)

    bad = np.zeros(30)
    bad[7] = np.nan
    samples = (jnp.asarray(ROWS[:30]), jnp.asarray(bad))

    def grad(params, sample):
        return [g + sample[1] for g in problem.grad(params, sample[0])]

    tx = untuned(schedule, correction=correction)
    params, state = train(correction, tx, grad, problem.params(), samples)
    used = np.delete(ROWS[:30], 7, axis=0)
    rows = units_run(
        lambda k, x, which: problem.numpy_grad(x, used[k]),
        problem.x0,
        29,
        correction=correction,
        lr=schedule,
    )
    assert_trees_close(params, rows[-1]["x"], rtol=1e-10)
    assert int(parts(correction, state)[0].skipped) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"scope": "tensor", "norm": "mean", "lr": 0.05, "weight_decay": 0.1},
            marks=pytest.mark.long,
        ),
    ],
)
def test_with_both_units_1_and_correction_it_is_storm_plus(options):
    """Bit for bit, in the float32 that any difference would show in."""
    problem, samples = Regression(), jnp.asarray(ROWS[:60])
    params = problem.params(jnp.float32)
    tx = untuned(correction=True, distance=1.0, gradient=1.0, **options)
    got, state = run(tx, problem.grad, params, samples)
    expected, expected_state = run(storm_plus(**options), problem.grad, params, samples)
    assert_trees_equal(got, expected)
    assert_trees_equal(state.storm, expected_state)
    verify(state)  # finds the state of the template within


# --- no unit is special ----------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@MODES
def test_the_units_of_f_and_x_do_not_matter(correction):
    """f'(x) = f_unit f(x / x_unit) from x_unit x_1 visits x_unit times the points of f."""
    problem, samples = Regression(), jnp.asarray(ROWS[:100])
    tx = untuned(correction=correction, scope="tensor")

    @jax.jit
    def ends(f_unit, x_unit):
        def grad(params, rows):
            g = problem.grad([p / x_unit for p in params], rows)
            return [f_unit / x_unit * g_i for g_i in g]

        first = [x_unit * p for p in problem.params()]
        params, state = train(correction, tx, grad, first, samples)
        return [[p / x_unit for p in tree] for tree in (params, averaged(state, params))]

    plain = ends(1.0, 1.0)
    for f_unit, x_unit in [(1e7, 1.0), (1.0, 1e-3), (3e-9, 2e4)]:
        assert_trees_close(ends(f_unit, x_unit), plain, rtol=1e-9)


# --- the average -----------------------------------------------------------------------------


@MODES
def test_the_average_never_influences_the_run(correction):
    ends = [walk(correction, **options) for options in ({}, {"average": False})]
    assert_trees_equal(ends[0][0], ends[1][0])
    mean = averaged(ends[0][1], ends[0][0])
    assert float(jnp.abs(mean["a"] - ends[0][0]["a"]).max()) > 1e-4
    with pytest.raises(ValueError, match="average=False"):
        averaged(ends[1][1], PARAMS)


@MODES
def test_before_the_first_step_the_average_is_the_parameters(correction):
    tx = optax.chain(optax.clip(1.0), untuned(correction=correction))
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    for params in (PARAMS, half):
        assert_trees_equal(jax.jit(averaged)(tx.init(params), params), params)


@pytest.mark.parametrize("state", [(), storm_plus().init(PARAMS), optax.adam(0.1).init(PARAMS)])
def test_without_a_state_of_it_there_is_no_average(state):
    with pytest.raises(ValueError, match="needs a state of untuned"):
        averaged(state, PARAMS)


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"distance": 0.0}, ValueError, "distance must be positive, got 0.0; None measures it"),
        ({"distance": -1}, ValueError, "distance must be finite and not negative, got -1"),
        ({"gradient": np.inf}, ValueError, "gradient must be finite and not negative, got inf"),
        ({"gradient": 0}, ValueError, "gradient must be positive, got 0"),
        ({"gradient": np.nan}, ValueError, "gradient must be finite"),
        ({"distance": "1"}, TypeError, "distance must be a number, got '1'"),
        ({"gradient": True}, TypeError, "gradient must be a number, got True"),
        ({"correction": 1}, TypeError, "correction must be True or False, got 1"),
        ({"average": None}, TypeError, "average must be True or False, got None"),
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative"),
        ({"norm": "max"}, ValueError, "norm must be one of raw, mean, got 'max'"),
        ({"scope": "group"}, ValueError, "scope='group' and groups= go together"),
        ({"gradient_transform": 1}, TypeError, "gradient_transform must be an optax"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        untuned(**options)


def test_update_needs_the_parameters():
    tx = untuned()
    with pytest.raises(TypeError, match=r"needs the parameters.*got None as params"):
        tx.update(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="the state is of other parameters"):
        tx.update(PARAMS, tx.init({"a": jnp.ones(3), "b": jnp.ones(1)}), PARAMS)
    with pytest.raises(TypeError, match="structure of the parameters"):
        tx.update((PARAMS, 1.0), tx.init(PARAMS), PARAMS)


def test_with_correction_update_needs_grad_fn():
    tx = untuned(correction=True)
    with pytest.raises(TypeError, match="None as grad_fn"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
