"""optax's own table for contributed optimizers, run on ours."""

import functools
import inspect
import itertools

import pytest

from stormplus.jax import simplified_storm_plus, storm, storm_plus, untuned

jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
table = pytest.importorskip("optax.contrib._common_test")
if not hasattr(table, "_setup_matrix_parabola"):
    pytest.skip("the table of this optax has fewer targets", allow_module_level=True)

RULES = [storm_plus, simplified_storm_plus, storm, untuned]
TESTS = sorted(
    name[:-1]  # absl numbers the rows of each test
    for name in vars(table.ContribTest)
    if name.startswith("test_") and name[-1] == "0" and not name[-2].isdigit()
)
DIFFERENCES = {
    "test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such": (
        "the learning rate is called `lr`, as in torch; test_contract.py passes schedules"
    ),
}
AXES = {
    "wrap": [False],
    "target": [
        table._setup_parabola,
        table._setup_rosenbrock,
        table._setup_matrix_parabola,
        table._setup_mixed_tensor_target,
    ],
    "dtype": ["bfloat16", "float32"],
}


def with_objective(factory):
    """Return the factory of a transformation that takes `obj_fn`, as Sophia's does."""

    @functools.wraps(factory)
    def make(*args, **kwargs):
        tx = factory(*args, **kwargs)

        def update(updates, state, params, *, obj_fn, **extra):
            return tx.update(updates, state, params, grad_fn=jax.grad(obj_fn), **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return make


@pytest.mark.long
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("factory", RULES, ids=lambda factory: factory.__name__)
def test_optax_contrib_table(factory, test, monkeypatch):
    if test in DIFFERENCES:
        pytest.skip(DIFFERENCES[test])
    function = getattr(table.ContribTest, test + "0").__wrapped__
    # The table passes the objective to the optimizer that it calls "sophia".
    name, options = ("untuned", {}) if factory is untuned else ("sophia", {"lr": 0.3})
    made = factory if factory is untuned else with_objective(factory)
    monkeypatch.setattr(table, "_get_opt_factory", lambda _: made)
    arguments = {"opt_name": name, "opt_kwargs": options}
    arguments |= {"wrapper_name": None, "wrapper_kwargs": None}
    axes = {k: v for k, v in AXES.items() if k in inspect.signature(function).parameters}
    if "target" in axes:
        axes["dtype"] = ["float32"]  # to converge
    for values in itertools.product(*axes.values()):
        function(table.ContribTest(test + "0"), **arguments, **dict(zip(axes, values)))
