"""The facts of a benchmark: what was run, on what, and what limits the findings."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus.bench import finals
from stormplus.bench.style import ordered


@dataclass(frozen=True)
class Facts:
    """What was run, and on what."""

    runs: int
    diverged: int
    seeds: list[int]
    workloads: list[str]
    methods: list[str]
    budgets: dict[str, int]
    batch_sizes: dict[str, int]
    machines: list[str]
    versions: dict[str, str]
    measured: dict[str, str]  # on how many examples, where the rows tell it
    tuned: int  # pairs of a workload and a method with several lr, and a best one
    at_end: int  # of these

    def sentence(self) -> str:
        """In one sentence."""
        where = " and ".join(self.machines) or "an unnamed machine"
        return (
            f"{many(self.runs, 'run')} of {many(len(self.methods), 'method')} on "
            f"{many(len(self.workloads), 'workload')}, {many(len(self.seeds), 'seed')}, on "
            f"{where}; {many(self.diverged, 'run')} diverged."
        )

    def rates(self) -> str:
        """How often the best rate is at an end of the range; "" if nothing was tuned."""
        if not self.tuned:
            return ""
        end = ": a wider one might do better." if self.at_end else "."
        return (
            f"In {self.at_end:,} of {many(self.tuned, 'case')} (a method on a workload) the best "
            f"rate is at an end of the range{end}"
        )

    def examples(self) -> str:
        """On how many examples the losses are measured; "" if the rows do not tell."""
        return ", ".join(f"{name} {number}" for name, number in self.measured.items())


def facts(frame: pd.DataFrame) -> Facts:
    """Collect them; several versions of one package are all named."""
    runs = finals.runs(frame)
    versions: dict[str, set[str]] = {}
    for text in runs["versions"].unique():
        for name, version in json.loads(text).items():
            versions.setdefault(name, set()).add(str(version))
    by_workload = runs.groupby("workload", sort=True)
    measured = {name: sorted(part.dropna().unique()) for name, part in by_workload["measured"]}
    best = finals.at(frame, best_lr=True)
    return Facts(
        runs=len(runs),
        diverged=int(np.isinf(runs["loss"]).sum()),
        seeds=sorted(int(seed) for seed in runs["seed"].unique()),
        workloads=sorted(runs["workload"].unique()),
        methods=ordered(runs["method"]),
        budgets={name: int(value) for name, value in by_workload["budget"].max().items()},
        batch_sizes={name: int(value) for name, value in by_workload["batch_size"].max().items()},
        machines=sorted(name for name in runs["machine"].unique() if name),
        versions={name: ", ".join(sorted(found)) for name, found in sorted(versions.items())},
        measured={
            name: " or ".join(f"{int(number):,}" for number in numbers)
            for name, numbers in measured.items()
            if numbers
        },
        tuned=int(np.isfinite(best["loss"]).sum()),
        at_end=int(best["at_end"].sum()),
    )


def many(number: int, noun: str) -> str:
    """The number with its noun, as in: 1 run, 2,000 runs."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
