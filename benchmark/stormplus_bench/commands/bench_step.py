"""`stormplus bench-step`: time optimizer steps against torch.optim, gradients excluded.

Every round times each method once, in random order; ratios are medians over the rounds, so a change
of the machine's speed affects all methods alike.
"""

import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import torch
from dog import DoG  # type: ignore[import-untyped, unused-ignore]
from mechanic_pytorch import mechanize  # type: ignore[import-untyped, unused-ignore]
from prodigyopt import Prodigy  # type: ignore[import-untyped, unused-ignore]
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor, nn

from stormplus import StormPlus, Untuned
from stormplus_bench.memory import (
    ELEMENTS,
    TENSORS,
    peak,
    size_mb,
    state_mb,
    take_step,
    with_gradients,
)
from stormplus_bench.methods import COMPARED
from stormplus_bench.simulated_device import device_counts
from stormplus_bench.train.networks import perceptron, resnet34

Adam, SGD = torch.optim.Adam, torch.optim.SGD
BF16 = torch.bfloat16
FUSED = "/ Adam(fused)"  # times over those of torch.optim.Adam(fused=True)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Untuned": Untuned,
    "STORM+": partial(StormPlus, lr=1e-6),
    "STORM+ (check_finite=False)": partial(StormPlus, lr=1e-6, check_finite=False),
    "STORM+ (foreach=True)": partial(StormPlus, lr=1e-6, foreach=True),
    "Adam": partial(Adam, lr=1e-6, fused=True),
    "Adam (foreach=True)": partial(Adam, lr=1e-6, foreach=True),
    "SGD momentum": partial(SGD, lr=1e-6, momentum=0.9),
}
# The others of README's table.
OTHERS: dict[str, Callable[..., Any]] = {
    "Schedule-Free": partial(AdamWScheduleFree, lr=1e-6),
    "Prodigy": Prodigy,
    "Mechanic": partial(mechanize(torch.optim.AdamW), lr=1e-6),
    "DoG": DoG,
}


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def times_of(
    optimizers: Mapping[str, Any], params: list[nn.Parameter], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each optimizer's steps, one per round."""
    times: dict[str, list[float]] = {label: [] for label in optimizers}
    order, gradients = random.Random(0), [p.grad for p in params if p.grad is not None]
    for _ in range(rounds):
        for label in order.sample(list(times), len(times)):
            for g in gradients:
                g.mul_(1.0)  # gradients are in the cache, as after a backward pass
            times[label].append(seconds(partial(take_step, optimizers[label])))
    return times


def show(title: str, table: pd.DataFrame | pd.Series) -> None:
    click.echo(f"\n{title}\n{table.to_string(float_format='{:.3g}'.format)}")


def step_times(
    name: str, shapes: list[torch.Size], rounds: int, makes: Mapping[str, Callable[..., Any]]
) -> pd.DataFrame:
    """Print and return times of a step, ratios to Adam's, and sizes of the state."""
    params = with_gradients(shapes)
    size = size_mb(params)
    optimizers = {label: make(params) for label, make in makes.items()}
    for opt in optimizers.values():
        if isinstance(opt, AdamWScheduleFree):
            opt.train()
        for _ in range(2):  # the first sample of a pair takes one pass
            take_step(opt)
    again = seconds(optimizers["Adam"].step)
    many = min(500, round(0.01 * rounds / again))  # short steps are timed more often
    times = times_of(optimizers, params, max(rounds, many))
    table = pd.DataFrame(index=list(optimizers))
    table["ms"] = [1e3 * median(each) for each in times.values()]
    table[FUSED] = [median(a / b for a, b in zip(each, times["Adam"])) for each in times.values()]
    table["state, MB"] = [state_mb(opt) for opt in optimizers.values()]
    table["state / model"] = table["state, MB"] / size
    weights = sum(p.numel() for p in params) / 1e6
    show(f"{name}: {weights:.3g} M parameters in {len(params)} tensors", table)
    return table


def peaks() -> None:
    """Print the peak memory of some steps beyond parameters, gradients and state."""
    if peak(SGD, {}) is None:
        return
    cases: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (StormPlus, backend | options)
        for backend in ({}, {"foreach": False}, {"foreach": True})
        for options in ({}, {"weight_decay": 0.1})
    ]
    cases += [(Untuned, {}), (Adam, {"fused": True}), (Adam, {"foreach": True})]
    found = {}
    for cls, options in cases:
        label = ", ".join(f"{name}={value}" for name, value in options.items())
        found[f"{cls.__name__}({label})"] = peak(cls, options)
    show(
        f"{TENSORS * ELEMENTS / 1e6:.0f} M parameters in {TENSORS} tensors: peak memory beyond "
        "parameters, gradients and state, in sizes of the model",
        pd.Series(found),
    )


def launch_counts() -> None:
    """Print launches, syncs and copies of a step on a simulated GPU without Triton."""
    shapes = [p.shape for p in resnet34(1000).parameters()]
    cases: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "Untuned": Untuned,
        "Untuned(state_dtype=bfloat16)": partial(Untuned, state_dtype=BF16),
        "Untuned, bfloat16 parameters": Untuned,
        "StormPlus, a pair": StormPlus,
        "StormPlus(check_finite=False), a pair": partial(StormPlus, check_finite=False),
        "Adam(foreach=True)": partial(Adam, foreach=True),
        "Adam(fused=True)": partial(Adam, fused=True),
    }
    found = {}
    for label, make in cases.items():
        dtype = BF16 if "bfloat16 parameters" in label else torch.float32
        found[label] = device_counts(make, shapes, dtype=dtype)._asdict()
    title = f"Per step on a simulated GPU without Triton, ResNet34's {len(shapes)} tensors"
    show(title, pd.DataFrame(found).T)


def share_of_training(rounds: int) -> None:
    """Print the optimizer's share of a training step of ResNet34 on CIFAR-sized images."""
    torch.manual_seed(0)
    model = resnet34()
    x, y = torch.randn(100, 3, 32, 32), torch.randint(10, (100,))
    click.echo("\nResNet34, a batch of 100 images of 32x32: optimizer's share of a training step")
    for label in ("STORM+", "Untuned", "Adam"):
        opt: Any = OPTIMIZERS[label](model.parameters())
        inside = 0.0

        def closure() -> Tensor:
            nonlocal inside
            start = time.perf_counter()
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            inside += time.perf_counter() - start
            return loss

        shares = []
        for i in range(rounds + 2):
            inside = 0.0
            total = seconds(lambda: opt.step(closure))
            if i >= 2:  # the first has one evaluation, the second may compile
                shares.append((total - inside) / total)
        click.echo(f"  {label:8s}{100 * median(shares):5.1f}%  (a step: {total:.2f} s)")


@click.command(name="bench-step")
@click.option("--quick", is_flag=True, help="Smaller tensors, fewer rounds.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the times of README's methods, for `stormplus report --step-times`.",
)
def bench_step(quick: bool, output: Path | None) -> None:
    """Time a step of STORM+ and Untuned against Adam and SGD, gradients excluded."""
    click.echo(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.machine()} {platform.processor() or ''}, {os.cpu_count()} cores"
    )
    rounds = 3 if quick else 15
    large = [p.shape for p in resnet34(1000).parameters()]
    table = step_times("ResNet34", large, rounds, OPTIMIZERS | OTHERS)
    if output is not None:
        found = {
            FUSED: table.loc[list(COMPARED), FUSED].round(3).to_dict(),
            "parameters": sum(shape.numel() for shape in large),
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        output.write_text(json.dumps(found, indent=1) + "\n")
    # 8 tensors, 37,000 weights: a step costs Python, not memory.
    small = perceptron(64, 128, 128, 88, 10)
    step_times("a small perceptron", [p.shape for p in small.parameters()], rounds, OPTIMIZERS)
    step_times("one tensor", [torch.Size([10**7 if quick else 10**8])], rounds, OPTIMIZERS)
    peaks()
    launch_counts()
    share_of_training(2 if quick else 5)
