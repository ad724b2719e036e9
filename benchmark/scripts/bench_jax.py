"""What a STORM+ step costs in JAX beside `optax.adam`, on the same gradient.

    python benchmark/scripts/bench_jax.py [--rounds 40]

The methods take turns, round after round, and each figure is the least over the rounds:
other load on the machine only ever adds time. "Two evaluations included": a STORM+ step
evaluates the gradient twice, a step of Adam once.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from stormplus.jax import storm_plus, untuned

BAR = 2.5
STEPS = 200
COMPILATIONS = 3
MLPS = [(32, 32), (64, 64), (256, 128)]  # hidden units, batch

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def least_seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least time of each over `rounds` rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())  # compile
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def mlp(hidden: int) -> tuple[dict[str, jax.Array], Callable[[Any, jax.Array], jax.Array]]:
    """A perceptron on scikit-learn's digits: its parameters, and the loss of rows i."""
    digits = load_digits()
    images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(k1, (64, hidden)) / 8,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(k2, (hidden, 10)) / np.sqrt(hidden),
        "b2": jnp.zeros(10),
    }

    def loss(p: Any, i: jax.Array) -> jax.Array:
        logits = jnp.tanh(images[i] @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[i]).mean()

    return params, loss


def adam_step(loss: Any, tx: Any) -> Step:
    def step(params: Any, state: Any, sample: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, sample), state, params)
        return optax.apply_updates(params, updates), state

    return step


def storm_step(loss: Any, tx: Any) -> Step:
    def step(params: Any, state: Any, sample: Any) -> tuple[Any, Any]:
        def grad_fn(p: Any) -> Any:
            return jax.grad(loss)(p, sample)

        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    return step


def scan_run(step: Step, params: Any, state: Any, batch: int) -> Callable[[], Any]:
    rows = jax.random.randint(jax.random.key(1), (STEPS, batch), 0, 1797)
    loop = jax.jit(lambda p, s: jax.lax.scan(lambda c, i: (step(*c, i), None), (p, s), rows)[0])
    return lambda: loop(params, state)


def resnet34_shapes() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(3, 3, before, width), (width,), (width,)]
            shapes += [(3, 3, width, width), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(1, 1, before, width), (width,), (width,)]
            before = width
    return [*shapes, (512, 1000), (1000,)]


def resnet34_loss(params: list[jax.Array], sample: list[jax.Array]) -> jax.Array:
    """Each leaf as a linear layer with two rows of input: gradients from matrix products,
    cheap enough that the optimizers' own passes over memory show.
    """
    rows = [xi @ x.reshape(-1, x.shape[-1]) for x, xi in zip(params, sample, strict=True)]
    return sum((jnp.square(row).mean() for row in rows), start=jnp.zeros(()))


def donating_run(step: Step, params: Any, state: Any, sample: Any) -> Callable[[], Any]:
    jitted = jax.jit(step, donate_argnums=(0, 1))
    carry = [jax.tree.map(jnp.copy, params), state]

    def run() -> Any:
        carry[:] = jitted(*carry, sample)
        return carry

    return run


def layers(leaves: int) -> list[jax.Array]:
    """Matrices and vectors of four shapes, as a network of equal layers has them."""
    shapes = [(64, 64), (64,), (64, 256), (256,)] * (leaves // 4)
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) / 8 for shape in shapes]


def compile_and_run(tx: Any, params: Any, rounds: int) -> tuple[float, float]:
    """The least CPU seconds to trace and compile an update, and the least seconds to run it."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = (params, tx.init(params), params)
    seconds = []
    for _ in range(COMPILATIONS):
        jax.clear_caches()
        start = time.process_time()
        compiled = jax.jit(step).lower(*arguments).compile()
        seconds.append(time.process_time() - start)
    return min(seconds), least_seconds({"": lambda: compiled(*arguments)}, rounds)[""]


def report(name: str, seconds: dict[str, float], unit: str, scale: float) -> float:
    adam = seconds["adam"]
    for method, value in seconds.items():
        print(f"  {name:<34} {method:<18} {value * scale:9.1f} {unit}  {value / adam:5.2f} x adam")
    return seconds["storm+"] / adam


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="repetitions of each figure")
    rounds = parser.parse_args().rounds
    adam, sgd, storm = optax.adam(1e-3), optax.sgd(0.1, momentum=0.9), storm_plus()

    print(
        f"jax {jax.__version__}, optax {optax.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{jax.devices()[0].device_kind}; least of {rounds} rounds"
    )

    print("\nuntuned and adam, the update alone: CPU seconds to compile, milliseconds to run:")
    for leaves in (80, 240):
        params = layers(leaves)
        ours, theirs = (compile_and_run(tx, params, rounds) for tx in (untuned(), adam))
        print(
            f"  {leaves} leaves: compile {ours[0]:.2f} s, {ours[0] / theirs[0]:.1f} x adam; "
            f"run {ours[1] * 1e3:.2f} ms, {ours[1] / theirs[1]:.1f} x adam"
        )

    print(f"\nInside lax.scan, a step of a perceptron on digits, mean of {STEPS} steps:")
    ratios = []
    for hidden, batch in MLPS:
        params, loss = mlp(hidden)
        seconds = least_seconds(
            {
                "adam": scan_run(adam_step(loss, adam), params, adam.init(params), batch),
                "sgd, momentum": scan_run(adam_step(loss, sgd), params, sgd.init(params), batch),
                "storm+": scan_run(storm_step(loss, storm), params, storm.init(params), batch),
            },
            rounds,
        )
        ratios.append(report(f"{hidden} hidden units, batch {batch}", seconds, "us", 1e6 / STEPS))

    shapes = resnet34_shapes()
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    sample = [
        jnp.asarray(rng.standard_normal((2, leaf.size // leaf.shape[-1])), jnp.float32)
        for leaf in weights
    ]
    millions = sum(leaf.size for leaf in weights) / 1e6
    print(
        f"\nOne compiled step on ResNet34's tree, {len(shapes)} leaves, {millions:.1f} M elements:"
    )
    make = functools.partial(donating_run, params=weights, sample=sample)
    seconds = least_seconds(
        {
            "adam": make(adam_step(resnet34_loss, adam), state=adam.init(weights)),
            "sgd, momentum": make(adam_step(resnet34_loss, sgd), state=sgd.init(weights)),
            "storm+": make(storm_step(resnet34_loss, storm), state=storm.init(weights)),
        },
        rounds,
    )
    report("ResNet34", seconds, "ms", 1e3)

    print(
        f"\nstorm+ inside lax.scan, two evaluations included: {max(ratios):.2f} x adam at worst "
        f"(aim: at most {BAR})"
    )


if __name__ == "__main__":
    main()
