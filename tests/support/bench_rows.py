"""A benchmark small enough to score by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from stormplus.bench import rows


def make_run(
    losses: Iterable[float | None],
    *,
    workload: str = "w",
    method: str = "SGD",
    lr: float = 0.1,
    default: bool = True,
    seed: int = 0,
    status: str = "done",
    evaluations: Iterable[float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A run with these losses at 0, 25, 50, ... evaluations of a budget of 100."""
    losses = list(losses)
    times = [25.0 * i for i in range(len(losses))] if evaluations is None else list(evaluations)
    curve = {
        "evaluations": times,
        "samples": [64 * t for t in times],
        "seconds": [0.01 * t for t in times],
        "train_loss": losses,
        "valid_loss": losses,
        "train_accuracy": [None] * len(losses),
        "valid_accuracy": [None] * len(losses),
        "grad_norm": losses,
    }
    run = {
        "workload": workload,
        "method": method,
        "lr": lr,
        "default": default,
        "seed": seed,
        "status": status,
        "budget": 100,
        "batch_size": 64,
        "peak_memory_mb": 300.0,
        "state_mb": 0.5,
        "curve": curve,
        "versions": {"stormplus": "0.1.0", "torch": "2.13.0"},
        "machine": "a test",
    }
    return run | more


def frame_of(tmp_path: Path, runs: Iterable[dict[str, Any]]) -> pd.DataFrame:
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "rows.jsonl"
    for run in runs:
        rows.append(path, run)
    return rows.load(path)


def hand_made() -> list[dict[str, Any]]:
    """Two workloads, three methods, two seeds; evaluations 0, 25, 50, 75, 100.

    a      STORM+ lr 1 (default)   seed 0: 10 6 4 2 1     seed 1: 10 6 4 2 3
           STORM+ lr 10            both:   10 9 8 7 6
           SGD    lr 0.1 (default) both:   10 8 6 5 4
           SGD    lr 1             seed 0: 10 5 2 1 0     seed 1: 10 5 2 1 1
           Adam   lr 0.001         seed 0: diverged       seed 1: diverged
    b      STORM+ lr 1 (default)   both:   2 1.5 1 1 1
           SGD    lr 0.1 (default) both:   2 1 0.5 0.5 0.5
           Adam   lr 0.001         seed 0: 2 1.5 1 0.6 0.5, seed 1: diverged
    """
    ours = {"method": "STORM+", "lr": 1.0}
    sgd = {"method": "SGD", "lr": 0.1}
    adam = {"method": "Adam", "lr": 0.001}
    runs = []
    for seed in (0, 1):
        a = {"workload": "a", "seed": seed}
        b = {"workload": "b", "seed": seed}
        runs += [
            make_run([10, 6, 4, 2, 3 if seed else 1], **a, **ours),
            make_run([10, 9, 8, 7, 6], **a, method="STORM+", lr=10.0, default=False),
            make_run([10, 8, 6, 5, 4], **a, **sgd),
            make_run([10, 5, 2, 1, seed], **a, method="SGD", lr=1.0, default=False),
            make_run([10, 40], **a, **adam, status="diverged"),
            make_run([2, 1.5, 1, 1, 1], **b, **ours),
            make_run([2, 1, 0.5, 0.5, 0.5], **b, **sgd),
        ]
    runs.append(make_run([2, 1.5, 1, 0.6, 0.5], workload="b", seed=0, **adam))
    runs.append(make_run([2, 9], workload="b", seed=1, **adam, status="diverged"))
    return runs


def swept() -> list[dict[str, Any]]:
    """`hand_made`, and where a method ran one lr a second one, which is worse."""
    runs = hand_made()
    for seed in (0, 1):
        b = {"workload": "b", "seed": seed, "default": False}
        runs += [
            make_run([2, 2, 2, 2, 2], **b, method="STORM+", lr=10.0),
            make_run([2, 9], **b, method="SGD", lr=1.0, status="diverged"),
            make_run([2, 9], **b, method="Adam", lr=0.01, status="diverged"),
            make_run(
                [10, 40], **(b | {"workload": "a"}), method="Adam", lr=0.01, status="diverged"
            ),
        ]
    return runs
