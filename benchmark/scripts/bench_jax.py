"""What a STORM+ step costs in JAX beside `optax.adam`, on the same gradient.

    python benchmark/scripts/bench_jax.py [--rounds 40]

The methods take turns, round after round, and each figure is the least over the rounds:
other load on the machine only ever adds time. "Two evaluations included": a STORM+ step
evaluates the gradient twice, a step of Adam once.
"""

from __future__ import annotations

import argparse
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
from stormplus_bench.train.networks import resnet34

BAR = 2.5
STEPS = 200
COMPILATIONS = 3
MLPS = [(32, 32), (64, 64), (256, 128)]  # hidden units, batch
METHODS = {
    "adam": optax.adam(1e-3),
    "sgd, momentum": optax.sgd(0.1, momentum=0.9),
    "storm+": storm_plus(),
}

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


def step_of(loss: Any, tx: Any) -> Step:
    tx = optax.with_extra_args_support(tx)  # Adam ignores grad_fn

    def step(params: Any, state: Any, sample: Any) -> tuple[Any, Any]:
        def grad_fn(p: Any) -> Any:
            return jax.grad(loss)(p, sample)

        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    return step


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


def scan_run(step: Step, params: Any, state: Any, batch: int) -> Callable[[], Any]:
    rows = jax.random.randint(jax.random.key(1), (STEPS, batch), 0, 1797)
    loop = jax.jit(lambda p, s: jax.lax.scan(lambda c, i: (step(*c, i), None), (p, s), rows)[0])
    return lambda: loop(params, state)


def linear_layers(params: list[jax.Array], sample: list[jax.Array]) -> jax.Array:
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


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


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
    rounds, rng = parser.parse_args().rounds, np.random.default_rng(0)
    print(
        f"jax {jax.__version__}, optax {optax.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{jax.devices()[0].device_kind}; least of {rounds} rounds"
    )

    print("\nuntuned and adam, the update alone: CPU seconds to compile, milliseconds to run:")
    for leaves in (80, 240):
        shapes = [(64, 64), (64,), (64, 256), (256,)] * (leaves // 4)  # a network of equal layers
        params = [normal(rng, shape) / 8 for shape in shapes]
        ours, theirs = (compile_and_run(tx, params, rounds) for tx in (untuned(), METHODS["adam"]))
        print(
            f"  {leaves} leaves: compile {ours[0]:.2f} s, {ours[0] / theirs[0]:.1f} x adam; "
            f"run {ours[1] * 1e3:.2f} ms, {ours[1] / theirs[1]:.1f} x adam"
        )

    print(f"\nInside lax.scan, a step of a perceptron on digits, mean of {STEPS} steps:")
    ratios = []
    for hidden, batch in MLPS:
        params, loss = mlp(hidden)
        runs = {
            name: scan_run(step_of(loss, tx), params, tx.init(params), batch)
            for name, tx in METHODS.items()
        }
        seconds = least_seconds(runs, rounds)
        ratios.append(report(f"{hidden} hidden units, batch {batch}", seconds, "us", 1e6 / STEPS))

    weights = [normal(rng, tuple(reversed(p.shape))) for p in resnet34(1000).parameters()]
    sample = [normal(rng, (2, leaf.size // leaf.shape[-1])) for leaf in weights]
    count, millions = len(weights), sum(leaf.size for leaf in weights) / 1e6
    print(f"\nOne compiled step on ResNet34's tree, {count} leaves, {millions:.1f} M elements:")
    runs = {
        name: donating_run(step_of(linear_layers, tx), weights, tx.init(weights), sample)
        for name, tx in METHODS.items()
    }
    report("ResNet34", least_seconds(runs, rounds), "ms", 1e3)

    print(
        f"\nstorm+ inside lax.scan, two evaluations included: {max(ratios):.2f} x adam at worst "
        f"(aim: at most {BAR})"
    )


if __name__ == "__main__":
    main()
