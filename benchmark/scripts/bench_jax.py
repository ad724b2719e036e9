"""What an update of `untuned` costs in JAX beside `optax.adam`, as docs/jax.md says.

    python benchmark/scripts/bench_jax.py [--rounds 40]

Each figure is the least of its repetitions: other load on the machine only ever adds time.
"""

import argparse
import os
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stormplus.jax import untuned

COMPILATIONS = 3
METHODS = {"untuned": untuned(), "adam": optax.adam(1e-3)}


def compile_and_run(tx: Any, params: Any, rounds: int) -> tuple[float, float]:
    """Return the CPU seconds to trace and compile an update, and the seconds to run it."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = (params, tx.init(params), params)
    compilations, runs = [], []
    for _ in range(COMPILATIONS):
        jax.clear_caches()
        start = time.process_time()
        compiled = jax.jit(step).lower(*arguments).compile()
        compilations.append(time.process_time() - start)
    for _ in range(rounds + 1):  # the first run is the slowest
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        runs.append(time.perf_counter() - start)
    return min(compilations), min(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="runs of each update")
    rounds, rng = parser.parse_args().rounds, np.random.default_rng(0)
    print(
        f"jax {jax.__version__}, optax {optax.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{jax.devices()[0].device_kind}; least of {rounds} runs"
    )
    for leaves in (80, 240):
        shapes = [(64, 64), (64,), (64, 256), (256,)] * (leaves // 4)  # a network of equal layers
        params = [jnp.asarray(rng.standard_normal(shape) / 8, jnp.float32) for shape in shapes]
        ours, theirs = (compile_and_run(tx, params, rounds) for tx in METHODS.values())
        print(
            f"{leaves} leaves: compile {ours[0]:.2f} s, {ours[0] / theirs[0]:.1f} x adam; "
            f"run {ours[1] * 1e3:.2f} ms, {ours[1] / theirs[1]:.1f} x adam"
        )


if __name__ == "__main__":
    main()
