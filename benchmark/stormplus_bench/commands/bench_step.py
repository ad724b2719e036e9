"""`stormplus bench-step`: time the optimizer's own work against torch.optim, print ratios.

Each round times every method once; the ratios are medians over the rounds, so that a machine that
slows down slows all of them. Nothing here asserts a timing.
"""

from __future__ import annotations

import cProfile
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import click
import torch
from torch import Tensor, nn

from stormplus import StormPlus, Untuned
from stormplus_bench.launches import launches
from stormplus_bench.memory import ELEMENTS, TENSORS, peak, state_bytes
from stormplus_bench.train.networks import resnet34


def parameters(shapes: list[torch.Size]) -> list[nn.Parameter]:
    params = [nn.Parameter(0.01 * torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def small_perceptron() -> nn.Module:
    """8 tensors, 37,000 weights: here a step is Python, not memory."""
    widths = (64, 128, 128, 88, 10)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def ours(params: list[nn.Parameter], **options: bool) -> tuple[StormPlus, Callable[[], None]]:
    opt = StormPlus(params, lr=1e-6, **options)  # type: ignore[arg-type]
    opt.estimate()

    def pair() -> None:
        opt.move()
        opt.estimate()

    return opt, pair


def compare(name: str, shapes: list[torch.Size], rounds: int) -> None:
    params = parameters(shapes)
    size = sum(p.numel() * p.element_size() for p in params)
    optimizers: dict[str, torch.optim.Optimizer] = {}
    runs: dict[str, Callable[[], object]] = {}
    for label, options in {
        "StormPlus (default)": {},
        "StormPlus (check_finite=False)": {"check_finite": False},
        "StormPlus (fused)": {"fused": True},
        "StormPlus (fused, check_finite=False)": {"fused": True, "check_finite": False},
        "StormPlus (foreach)": {"foreach": True},
    }.items():
        optimizers[label], runs[label] = ours(params, **options)
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "Untuned (one gradient)": lambda: Untuned(params),
        "SGD(momentum=0.9)": lambda: torch.optim.SGD(params, lr=1e-6, momentum=0.9),
        "Adam(foreach=False)": lambda: torch.optim.Adam(params, lr=1e-6, foreach=False),
        "Adam(foreach=True)": lambda: torch.optim.Adam(params, lr=1e-6, foreach=True),
        "Adam(fused=True)": lambda: torch.optim.Adam(params, lr=1e-6, fused=True),
    }
    for label, make in makers.items():
        optimizers[label] = make()
        runs[label] = optimizers[label].step
    # A copy reads one stream of the parameters' size and writes another.
    sources, targets = parameters(shapes), parameters(shapes)

    @torch.no_grad()
    def copy_streams(streams: int) -> None:
        for _ in range(streams // 2):
            for source, target in zip(sources, targets):
                target.copy_(source)

    runs["copies, 8 streams"] = lambda: copy_streams(8)

    ready: dict[str, float] = {}
    for label, run in runs.items():
        ready[label] = _seconds(run)
    again = _seconds(runs["Adam(fused=True)"])
    times: dict[str, list[float]] = {label: [] for label in runs}
    # In an order drawn anew each round, and with the gradients in the cache, as a backward pass
    # leaves them: nobody gains from who came before. A step of a few microseconds is timed more
    # often.
    order = random.Random(0)
    gradients = [p.grad for p in params if p.grad is not None]
    for _ in range(max(rounds, min(500, round(0.01 * rounds / again)))):
        for label in order.sample(list(runs), len(runs)):
            for g in gradients:
                g.mul_(1.0)
            times[label].append(_seconds(runs[label]))

    def ratio(label: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[label], times[other]))

    click.echo(f"\n{name}: {size / 4e6:.3g} M parameters in {len(shapes)} tensors")
    heads = f"{'ms':>8s}{'/ foreach':>11s}{'/ fused':>9s}{'state':>18s}{'first call':>12s}"
    click.echo(" " * 38 + heads)
    for label in runs:
        opt = optimizers.get(label)
        held = state_bytes(opt) if opt else 0
        state = f"{held / 1e6:.1f} MB, {held / size:.3f}x" if opt else ""
        click.echo(
            f"{label:38s}{1e3 * statistics.median(times[label]):8.3g}"
            f"{ratio(label, 'Adam(foreach=True)'):10.2f}x{ratio(label, 'Adam(fused=True)'):8.2f}x"
            f"{state:>18s}{ready[label]:10.2f} s"
        )


def frozen_parameters(rounds: int, frozen: int = 1000) -> None:
    """What parameters that are not trained add to a step: ideally nothing."""
    makers: dict[str, Callable[[list[nn.Parameter]], Callable[[], object]]] = {
        "StormPlus": lambda params: ours(params)[1],
        "Untuned": lambda params: Untuned(params).step,
        "SGD(momentum=0.9)": lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9).step,
    }
    click.echo(f"\n{frozen:,} frozen parameters beside 4 trained ones: a step with them / without")
    for label, make in makers.items():
        steps = {}
        for count in (0, frozen):
            still = [nn.Parameter(torch.zeros(16), requires_grad=False) for _ in range(count)]
            steps[count] = make([*parameters([torch.Size([16])] * 4), *still])
            steps[count]()
        ratios = [_seconds(steps[frozen]) / _seconds(steps[0]) for _ in range(rounds)]
        click.echo(f"  {label:20s}{statistics.median(ratios):6.2f}x")


def peaks() -> None:
    """The resident set's growth in some steps, beyond the state, in sizes of the model."""
    if peak(torch.optim.SGD, {}) is None:
        return
    click.echo(
        f"\n{TENSORS * ELEMENTS / 1e6:.0f} M parameters in {TENSORS} tensors: peak of memory "
        "beside parameters, gradients and state, in sizes of the model"
    )
    decay = {"weight_decay": 0.1}
    cases: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (StormPlus, {}),
        (StormPlus, decay),
        (StormPlus, {"foreach": False}),
        (StormPlus, {"foreach": False} | decay),
        (StormPlus, {"foreach": True}),
        (StormPlus, {"foreach": True} | decay),
        (StormPlus, {"fused": True}),
        (Untuned, {}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.Adam, {"foreach": True}),
    ]
    for cls, options in cases:
        label = ", ".join(f"{name}={value}" for name, value in options.items())
        click.echo(f"  {f'{cls.__name__}({label})':46s}{peak(cls, options):6.2f}")


def launch_counts() -> None:
    """What a step would start on a device, as far as it can be told without one."""
    shapes = [p.shape for p in resnet34(1000).parameters()]
    click.echo(f"\nKernel launches a step on a device, ResNet34's {len(shapes)} tensors, counted")
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "StormPlus(foreach=True), a pair": lambda p: StormPlus(p, foreach=True, check_finite=False),
        "StormPlus(fused=True), a pair": lambda p: StormPlus(p, fused=True, check_finite=False),
        "Adam(foreach=True)": lambda p: torch.optim.Adam(p, foreach=True),
    }
    for label, make in makers.items():
        click.echo(f"  {label:46s}{launches(make, shapes):6d}")


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def share_of_training(rounds: int) -> None:
    """The optimizer's part of a whole training step of ResNet34 on CIFAR-sized images."""
    torch.manual_seed(0)
    model = resnet34()
    x, y = torch.randn(100, 3, 32, 32), torch.randint(10, (100,))
    click.echo("\nResNet34, a batch of 100 images of 32x32: share of a training step")
    makers: dict[str, Callable[[], Any]] = {
        "StormPlus, two gradients": lambda: StormPlus(model.parameters(), lr=1e-6),
        "StormPlus(fused=True)": lambda: StormPlus(model.parameters(), lr=1e-6, fused=True),
        "Untuned, one gradient": lambda: Untuned(model.parameters()),
        "Adam(fused=True)": lambda: torch.optim.Adam(model.parameters(), lr=1e-6, fused=True),
    }
    for label, make in makers.items():
        opt = make()
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
            inside, start = 0.0, time.perf_counter()
            opt.step(closure)
            total = time.perf_counter() - start
            if i >= 2:  # the first has one evaluation, the second may compile
                shares.append((total - inside) / total)
        click.echo(f"  {label:28s}{100 * statistics.median(shares):5.1f}%  (a step: {total:.2f} s)")


def profiles(rounds: int) -> None:
    """Where a step's time goes: StormPlus on ResNet34's shapes, Untuned on few weights."""
    _, pair = ours(parameters([p.shape for p in resnet34(1000).parameters()]))
    _profile("StormPlus on ResNet34's shapes", pair, rounds)
    small = parameters([p.shape for p in small_perceptron().parameters()])
    _profile("Untuned on a small perceptron", Untuned(small).step, 25 * rounds)


def _profile(name: str, run: Callable[[], object], rounds: int) -> None:
    for _ in range(3):
        run()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(rounds):
        run()
    profiler.disable()
    entries = sorted(profiler.getstats(), key=lambda entry: -entry.inlinetime)
    total = sum(entry.inlinetime for entry in entries)
    click.echo(f"\n{name}: share of the time inside each function")
    for entry in entries[:9]:
        title = entry.code if isinstance(entry.code, str) else entry.code.co_qualname
        click.echo(f"  {100 * entry.inlinetime / total:5.1f}%  {title}")


@click.command(name="bench-step")
@click.option("--quick", is_flag=True, help="Smaller tensors, fewer rounds.")
@click.option("--profile", is_flag=True, help="Only show where the time of a step goes.")
def bench_step(quick: bool, profile: bool) -> None:
    """Time a step of STORM+ against Adam and SGD, gradients excluded; print ratios."""
    click.echo(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.machine()} {platform.processor() or ''}, {os.cpu_count()} cores"
    )
    if profile:
        return profiles(40)
    rounds = 3 if quick else 15
    compare("ResNet34", [p.shape for p in resnet34(1000).parameters()], rounds)
    compare("a small perceptron", [p.shape for p in small_perceptron().parameters()], rounds)
    compare("one tensor", [torch.Size([10**7 if quick else 10**8])], rounds)
    peaks()
    launch_counts()
    frozen_parameters(20 * rounds)
    share_of_training(2 if quick else 5)
