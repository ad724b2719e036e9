"""Benchmarks small enough to score by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from stormplus_bench import rows


def make_row(losses: Iterable[float | None], **fields: Any) -> dict[str, Any]:
    """A row with these losses at 0, 25, 50, ... evaluations of a budget of 100."""
    losses = list(losses)
    times = list(fields.pop("evaluations", None) or [25.0 * i for i in range(len(losses))])
    curve = dict.fromkeys(rows.CURVE, [None] * len(losses))
    curve |= {"evaluations": times, "samples": [64 * t for t in times]}
    curve |= {"seconds": [0.01 * t for t in times]}
    curve |= dict.fromkeys(("train_loss", "valid_loss", "grad_norm"), losses)
    row = {
        **{"workload": "w", "method": "SGD", "lr": 0.1, "default": True, "seed": 0},
        **{"status": "done", "budget": 100, "batch_size": 64},
        **{"state_mb": 0.5, "curve": curve, "machine": "a test"},
        "versions": {"stormplus": "0.1.0", "torch": "2.13.0"},
    }
    return row | fields


def frame_of(found: Iterable[dict[str, Any]]) -> pd.DataFrame:
    return rows.frame_of(rows.finite(list(found)))


def write_rows(path: Path, found: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in found:
        rows.append(path, row)
    return path


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
    ours, sgd = {"method": "STORM+", "lr": 1.0}, {"method": "SGD", "lr": 0.1}
    adam = {"method": "Adam", "lr": 0.001}
    found = []
    for seed in (0, 1):
        a, b = ({"workload": name, "seed": seed} for name in "ab")
        found += [
            make_row([10, 6, 4, 2, 3 if seed else 1], **a, **ours),
            make_row([10, 9, 8, 7, 6], **a, method="STORM+", lr=10.0, default=False),
            make_row([10, 8, 6, 5, 4], **a, **sgd),
            make_row([10, 5, 2, 1, seed], **a, method="SGD", lr=1.0, default=False),
            make_row([10, 40], **a, **adam, status="diverged"),
            make_row([2, 1.5, 1, 1, 1], **b, **ours),
            make_row([2, 1, 0.5, 0.5, 0.5], **b, **sgd),
        ]
    found.append(make_row([2, 1.5, 1, 0.6, 0.5], workload="b", seed=0, **adam))
    found.append(make_row([2, 9], workload="b", seed=1, **adam, status="diverged"))
    return found
