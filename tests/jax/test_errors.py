"""What is refused, and what the error says."""

import jax
import jax.numpy as jnp
import optax
import pytest

from stormplus.jax import averaged, storm, storm_plus, untuned
from tests.jax.jax_problems import PAIRED, PARAMS, RATE, TRANSFORMATIONS

OTHER_STATE = "params do not match the structure of the optimizer state"
NO_GRADIENT = "must be a gradient with the structure of the parameters.*the gradient alone"

RATES = [  # lr or factor
    (-1.0, ValueError, "must be finite and not negative, got -1.0"),
    (float("nan"), ValueError, "must be finite"),
    ("1", TypeError, "must be a number, got '1'"),
]
OF_EACH = [
    ({"weight_decay": -0.1}, ValueError, "weight_decay must be .* got -0.1"),
    ({"maximize": 1}, TypeError, "maximize must be True or False, got 1"),
    ({"gradient_transform": optax.trace(0.9)}, ValueError, "must have no state.*TraceState"),
    ({"mask": {"a": 1.0, "b": True}}, TypeError, "True and False.*got 1.0"),
    ({"mask": {"z": True}}, ValueError, "pytree|mismatch"),
]
OF_PAIRS = [
    ({"decoupled_weight_decay": 0.1}, TypeError, "decoupled_weight_decay must be"),
    ({"unit": 0}, ValueError, "unit must be a positive finite number or 'first', got 0"),
    ({"unit": "mean"}, ValueError, "unit must be a positive finite number .* got 'mean'"),
    ({"scope": "tensor"}, TypeError, "unexpected keyword argument 'scope'"),
]
OF_STORM = [({"w": 0}, ValueError, "w must be a positive finite number, got 0")]
OF_UNTUNED = [
    ({"lr": 0.1}, TypeError, r"no learning rate.*factor=.*lr=0\.1"),
    ({"learning_rate": 0.1}, TypeError, "no learning rate.*learning_rate"),
    ({"factor": {"z": 1.0}}, ValueError, "pytree|mismatch"),
    ({"weight_decay": {"a": -1.0, "b": 0.0}}, ValueError, "weight_decay must be .* got -1.0"),
    ({"unit": None}, TypeError, "unexpected keyword argument 'unit'"),
    ({"state_dtype": jnp.float16}, ValueError, r"must be jnp\.bfloat16 or None"),
]

# Arguments of update; "state" is the parameters for which it was made.
A, B = PARAMS["a"], PARAMS["b"]
UPDATE_OF_EACH = [
    ({"params": None}, TypeError, "got None.* as params"),
    ({"updates": [A]}, ValueError, rf"the first argument of update\(\) {NO_GRADIENT}"),
    ({"updates": {"a": A[:, None], "b": B}}, ValueError, r"'a': \(2,\).*got.*'a': \(2, 1\)"),
    ({"state": {"a": jnp.ones(3), "b": B}}, ValueError, rf"{OTHER_STATE}.*tx.init.*got.*\(3,\)"),
    ({"state": {"a": A, "c": B}}, ValueError, f"{OTHER_STATE}.*tx.init.*got.*'c'"),
    ({"state": {"a": A.astype(int), "b": B}}, TypeError, r"\['a'\] is int.*mask="),
    ({"state": {"a": A.astype(complex), "b": B}}, TypeError, r"\['a'\] is complex.*mask="),
]
UPDATE_OF_PAIRS = [
    ({"grad_fn": None}, TypeError, r"grad_fn=grad_fn\)`; got dict as params and None as grad_fn"),
    ({"grad_fn": lambda p: (1.0, p)}, ValueError, f"what grad_fn returns {NO_GRADIENT}"),
]


def rows(*tables):
    """Return one case per row of a table and name of an optimizer for which it is meant."""
    return [(name, *row) for names, table in tables for name in names for row in table]


def call(tx, updates=PARAMS, state=PARAMS, params=PARAMS, grad_fn=lambda p: p):
    return tx.update(updates, tx.init(state), params, grad_fn=grad_fn)


@pytest.mark.parametrize(("name", "value", "error", "message"), rows((TRANSFORMATIONS, RATES)))
def test_a_bad_rate(name, value, error, message):
    with pytest.raises(error, match=f"{RATE[name]} {message}"):
        TRANSFORMATIONS[name](**{RATE[name]: value})


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    rows(
        (TRANSFORMATIONS, OF_EACH),
        (PAIRED, OF_PAIRS),
        (["storm"], OF_STORM),
        (["untuned"], OF_UNTUNED),
    ),
)
def test_bad_arguments(name, options, error, message):
    with pytest.raises(error, match=message):
        call(TRANSFORMATIONS[name](**options))


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    rows((TRANSFORMATIONS, UPDATE_OF_EACH), (["storm_plus"], UPDATE_OF_PAIRS)),
)
def test_bad_arguments_of_update(name, arguments, error, message):
    with pytest.raises(error, match=message):
        call(TRANSFORMATIONS[name](), **arguments)


@pytest.mark.parametrize("name", ["storm_plus", "untuned"])
def test_a_state_of_another_mask(name):
    part, whole = TRANSFORMATIONS[name](mask={"a": True, "b": False}), TRANSFORMATIONS[name]()
    for theirs, ours in ((part, whole), (whole, part)):
        with pytest.raises(ValueError, match=r"do not match the structure.*tx\.init.*MaskedNode"):
            ours.update(PARAMS, theirs.init(PARAMS), PARAMS, grad_fn=lambda p: p)


def test_a_constant_beside_a_traced_one():
    with pytest.raises(ValueError, match="c must be a positive finite number, got -1"):
        jax.vmap(lambda theta: storm(theta=theta, c=-1))(jnp.ones(2))


@pytest.mark.parametrize("state", [(), storm_plus().init(PARAMS), optax.adam(0.1).init(PARAMS)])
def test_without_a_state_of_untuned_there_is_no_average(state):
    with pytest.raises(ValueError, match="needs a state of untuned"):
        averaged(state, PARAMS)


def test_the_average_of_other_parameters():
    state = optax.flatten(untuned()).init(PARAMS)
    with pytest.raises(ValueError, match=r"do not match the structure.*optax\.flatten"):
        averaged(state, PARAMS)


MASKED = {
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
    "partition": lambda tx: optax.partition({0: tx, 1: optax.sgd(0.1)}, {"a": 0, "b": 1}),
    "selective_transform": lambda tx: optax.transforms.selective_transform(
        tx, freeze_mask={"a": False, "b": True}
    ),
}


@pytest.mark.parametrize("wrap", MASKED.values(), ids=MASKED)
def test_masked_trees(wrap):
    with pytest.raises(TypeError, match=r"MaskedNode.*pass mask="):
        wrap(storm_plus()).init(PARAMS)
