"""Sharded runs equal the single-device run, on eight devices that one machine pretends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: the number of devices is fixed when jax starts.
SCRIPT = """
import jax
jax.config.update("jax_enable_x64", True)
# Eight devices on two cores: steps queued one upon another would starve each other's
# collectives of threads.
jax.config.update("jax_cpu_enable_async_dispatch", False)
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from stormplus import untuned_rule
from stormplus.jax import storm_plus, simplified_storm_plus, storm, untuned
from tests.jax.jax_problems import step_of

untuned_rule.sample_stride = lambda size: 5  # leaves as small as these would be measured in full
assert len(jax.devices()) == 8, jax.devices()
rng = np.random.default_rng(0)
inputs, targets = rng.standard_normal((12, 16, 8)), rng.standard_normal((12, 16))
start = {"w1": rng.standard_normal((8, 24)) / 3, "b1": np.zeros(24), "w2": rng.standard_normal(24)}


def loss(p, batch):
    x, y = batch
    hidden = jnp.tanh(x @ p["w1"] + p["b1"])
    sharding = jax.typeof(hidden).sharding
    if any(sharding.spec[1:]):  # explicit axes: a contraction of sharded ones must say so
        hidden = jax.sharding.reshard(hidden, NamedSharding(sharding.mesh, P()))
    return jnp.mean((hidden @ p["w2"] - y) ** 2)


def train(tx, params, batches):
    step = jax.jit(step_of(tx, jax.grad(loss), jit=False), donate_argnums=(0, 1))
    state = tx.init(params)
    for batch in batches:
        params, state = jax.block_until_ready(step(params, state, batch))
    assert step._cache_size() <= 2, step._cache_size()
    return params, state


def put(tree, mesh, specs):
    return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs)


auto = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
explicit = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Explicit,))
replicated = {"w1": P(), "b1": P(), "w2": P()}
split = {"w1": P("devices", None), "b1": P("devices"), "w2": P("devices")}
heads = {"w1": P(None, "devices"), "b1": P("devices"), "w2": P()}
columns = {"w1": P(None, "devices"), "b1": P("devices"), "w2": P("devices")}
rows, whole = P("devices"), P()

MESHES = {
    "data": (auto, replicated, rows),
    "parameters": (auto, split, whole),
    "both": (auto, columns, rows),
    "data, explicit": (explicit, replicated, rows),
    "parameters, explicit": (explicit, heads, whole),
}
for make, options, names in (
    (storm_plus, {}, list(MESHES)),
    (storm_plus, {"unit": "first"}, list(MESHES)),
    (simplified_storm_plus, {}, ["both"]),
    (storm, {}, ["both"]),
    (untuned, {}, ["data", "both", "parameters, explicit"]),
    (untuned, {"state_dtype": jnp.bfloat16}, ["parameters", "parameters, explicit"]),
):
    tx = make(weight_decay=0.01, **({} if make is untuned else {"lr": 0.1}), **options)
    buffer = "z_minus_x" if make is untuned else "estimator"
    batches = list(zip(inputs, targets))
    one, one_state = train(tx, jax.tree.map(jnp.asarray, start), batches)
    for name in names:
        mesh, spec, data = MESHES[name]
        sharded = [put(batch, mesh, (data, data)) for batch in batches]
        params = put(start, mesh, spec)
        many, many_state = train(tx, params, sharded)
        for k in start:
            np.testing.assert_allclose(many[k], one[k], rtol=1e-9, atol=1e-12)
            d, one_d = getattr(many_state, buffer)[k], getattr(one_state, buffer)[k]
            np.testing.assert_allclose(d.astype(float), one_d.astype(float), rtol=1e-8, atol=1e-11)
            wanted = NamedSharding(mesh, spec[k])
            assert many[k].sharding.is_equivalent_to(wanted, many[k].ndim), (name, k)
            assert d.sharding.is_equivalent_to(wanted, d.ndim), (name, k, d.sharding)
        np.testing.assert_allclose(many_state.step_size, one_state.step_size, rtol=1e-10)
        assert int(many_state.step) == 12
        print(make.__name__, options, name, "equal")
"""


@pytest.mark.long
def test_sharded_runs_equal_the_single_device_run():
    pretended = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=os.environ | pretended, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 17
