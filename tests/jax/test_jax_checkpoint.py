"""A checkpoint goes through Orbax bit by bit, and the run goes on as if nothing were."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax_problems import Regression, assert_trees_equal, run

from stormplus.jax import storm_plus, uniform_iterate

SAMPLES = jnp.asarray(np.arange(40).reshape(10, 4))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.float32, {}),
        (jnp.bfloat16, {"scope": "tensor"}),
        (jnp.float32, {"mask": [True, False, True]}),
    ],
)
def test_round_trip(tmp_path, dtype, options):
    problem = Regression()

    def grad(params, rows):
        g = problem.grad([p.astype(jnp.float32) for p in params], rows)
        return [g_i.astype(dtype) for g_i in g]

    tx, keep = storm_plus(**options), uniform_iterate()
    params, state = run(tx, grad, problem.params(dtype), SAMPLES[:5])
    saved = {"params": params, "state": state, "kept": keep.update(keep.init(params), params)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        fresh = problem.params(dtype)
        template = {"params": fresh, "state": tx.init(fresh), "kept": keep.init(fresh)}
        restored = checkpointer.restore(tmp_path / "checkpoint", template)
    assert_trees_equal(restored, saved)
    assert type(restored["state"]) is type(state)
    straight = run(tx, grad, params, SAMPLES[5:], state)
    resumed = run(tx, grad, restored["params"], SAMPLES[5:], restored["state"])
    assert_trees_equal(resumed, straight)
    assert jax.tree.leaves(resumed)[0].dtype == dtype
