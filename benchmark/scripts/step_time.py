"""Time a step of each method of README's table relative to Adam(fused=True).

Only the optimizer's work on ResNet34's parameters is timed, without gradients; for STORM+ both
halves of its step. Each round times every method once, in turn. Writes docs/results/step_time.json.
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

from stormplus import StormPlus, Untuned
from stormplus_bench.train.networks import resnet34

ROUNDS = 15
OUT = Path("docs/results/step_time.json")


def main() -> None:
    params = list(resnet34(1000).parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    storm = StormPlus(params, lr=1e-6)
    storm.estimate()
    schedule_free = AdamWScheduleFree(params, lr=1e-6)
    schedule_free.train()
    steps: dict[str, Callable[[], Any]] = {
        "Untuned": Untuned(params).step,
        "STORM+": lambda: (storm.move(), storm.estimate()),
        "Adam": torch.optim.Adam(params, lr=1e-6, fused=True).step,
        "SGD momentum": torch.optim.SGD(params, lr=1e-6, momentum=0.9).step,
        "Schedule-Free": schedule_free.step,
        "Prodigy": Prodigy(params).step,
        "Mechanic": mechanize(torch.optim.AdamW)(params, lr=1e-6).step,
        "DoG": DoG(params).step,
    }
    for step in steps.values():
        step()  # allocates the buffers
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
