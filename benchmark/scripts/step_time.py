"""Time a step of each method of README's table relative to Adam(fused=True).

Only the optimizer's work on ResNet34's parameters is timed, without gradients; for STORM+ both
halves of its step. Writes docs/results/step_time.json.
"""

import json
import platform
from pathlib import Path

import torch
from dog import DoG
from mechanic_pytorch import mechanize
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree

from stormplus import StormPlus, Untuned
from stormplus_bench.commands.bench_step import median_ratio, times_of
from stormplus_bench.memory import take_step, with_gradients
from stormplus_bench.train.networks import resnet34

ROUNDS = 15
OUT = Path("docs/results/step_time.json")


def main() -> None:
    params = with_gradients([p.shape for p in resnet34(1000).parameters()])
    schedule_free = AdamWScheduleFree(params, lr=1e-6)
    schedule_free.train()
    optimizers = {
        "Untuned": Untuned(params),
        "STORM+": StormPlus(params, lr=1e-6),
        "Adam": torch.optim.Adam(params, lr=1e-6, fused=True),
        "SGD momentum": torch.optim.SGD(params, lr=1e-6, momentum=0.9),
        "Schedule-Free": schedule_free,
        "Prodigy": Prodigy(params),
        "Mechanic": mechanize(torch.optim.AdamW)(params, lr=1e-6),
        "DoG": DoG(params),
    }
    for optimizer in optimizers.values():
        take_step(optimizer)  # allocates the buffers
    times = times_of(optimizers, params, ROUNDS)
    found = {
        "/ Adam(fused)": {n: round(median_ratio(t, times["Adam"]), 3) for n, t in times.items()},
        "parameters": sum(p.numel() for p in params),
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
