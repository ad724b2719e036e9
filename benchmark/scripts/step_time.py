"""A step of each method of README's table over one of Adam(fused=True), into docs/results.

The optimizer's own work on ResNet34's parameters, gradients excluded. STORM+ has both halves of its
step in it; the second gradient that it takes is not. Each round times every method once, in turn.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dog import DoG
from mechanic_pytorch import mechanize
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree
from torch import nn

from stormplus import StormPlus, Untuned
from stormplus_bench.train.networks import resnet34

ROUNDS = 15
OUT = Path("docs/results/step_time.json")


def main() -> None:
    shapes = [p.shape for p in resnet34(1000).parameters()]
    params = [nn.Parameter(0.01 * torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    storm = StormPlus(params, lr=1e-6)
    storm.estimate()
    free = AdamWScheduleFree(params, lr=1e-6)
    free.train()

    def pair() -> None:
        storm.move()
        storm.estimate()

    steps: dict[str, Callable[[], Any]] = {
        "Untuned": Untuned(params).step,
        "STORM+": pair,
        "Adam": torch.optim.Adam(params, lr=1e-6, fused=True).step,
        "SGD momentum": torch.optim.SGD(params, lr=1e-6, momentum=0.9).step,
        "Schedule-Free": free.step,
        "Prodigy": Prodigy(params).step,
        "Mechanic": mechanize(torch.optim.AdamW)(params, lr=1e-6).step,
        "DoG": DoG(params).step,
    }
    for step in steps.values():
        seconds(step)  # buffers are made in the first
    times = [{name: seconds(step) for name, step in steps.items()} for _ in range(ROUNDS)]
    ratios = {name: statistics.median(t[name] / t["Adam"] for t in times) for name in steps}
    found = {
        "/ Adam(fused)": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "parameters": sum(p.numel() for p in params),
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
