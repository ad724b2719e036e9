"""The tables of the paper's experiment: pure functions of the frame that `rows.load` gives."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals, markdown
from stormplus_bench.claims import AXES, CLAIMS, METRICS, NAMES, Reading, Standings, verdicts
from stormplus_bench.methods import NO_RATE, ordered

BATCH = 100
WIDE = 1e4  # from here on a loss is written with an exponent


def with_epochs(frame: pd.DataFrame, images: int) -> pd.DataFrame:
    """Add the column `epoch`: passes over the data, as in the paper's figure."""
    return frame.assign(epoch=frame["samples"] * BATCH / images)


def where(frame: pd.DataFrame) -> str:
    """The machine, the versions and the seeds."""
    versions = json.loads(frame["versions"].iloc[-1])
    named = ", ".join(f"{name} {versions.get(name, '?')}" for name in ("stormplus", "torch"))
    machines = "; ".join(sorted(frame["machine"].unique()))
    numbers = [str(seed) for seed in sorted(frame["seed"].unique())]
    seeds = f"seeds {' and '.join(numbers)}"
    if len(numbers) == 1:
        seeds = f"seed {numbers[0]}, one run each"
    return f"Machine: {machines}; {named}; {seeds}.\n"


def rates(frame: pd.DataFrame) -> str:
    """The training loss at the end of each run, method by rate."""
    ends = finals.per_rate(frame).pivot(index="method", columns="lr", values="loss")
    cells = ends.apply(lambda line: line.map(partial(_cell, lowest=line.min())), axis=1)
    cells = cells.loc[ordered(cells.index)].rename(columns="{:g}".format)
    ends_of_range = [row.method for row in finals.tuned(frame).itertuples() if row.at_end]
    note = "Training loss at the end of each run; the best rate is bold."
    if ends_of_range:
        note += (
            f" At an end of its range, so a wider one might do better: {', '.join(ends_of_range)}."
        )
    return f"{markdown.table(cells, 'method')}\n\n{note}\n"


def _cell(value: float, lowest: float) -> str:
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "diverged"
    text = number(value)
    return f"**{text}**" if value == lowest else text


def number(value: float) -> str:
    """Three places; an exponent for what is too large, or too small, to be seen so."""
    if value >= WIDE:
        return f"{value:.1e}"
    return f"{value:.3f}" if value >= 0.01 or value <= 0 else f"{value:.2g}"


def standings(frame: pd.DataFrame, axis: str) -> str:
    """Every method where all of them have come to on this axis; ± is half the seeds' spread."""
    ends = Standings(frame, axis)
    lrs = frame.groupby("method")["lr"].first()
    lines = {}
    for method in ordered(ends.values):
        lr = "" if method in NO_RATE else f"{lrs[method]:g}"
        line = {"lr": lr, "seeds": str(ends.seeds[method])}
        for metric in METRICS:
            value = ends.values[method][metric]
            text = number(value) if math.isfinite(value) else "diverged"
            if ends.seeds[method] > 1 and math.isfinite(value):
                text += f" ± {number(ends.unsure[method][metric])}"
            line[NAMES[metric]] = text
        lines[method] = line
    table = markdown.table(pd.DataFrame.from_dict(lines, orient="index"), "method")
    name = AXES[axis] if ends.reach != 1 else AXES[axis].removesuffix("s")
    return f"At {ends.reach:g} {name}:\n\n{table}\n"


def judged(frame: pd.DataFrame, readings: Sequence[Reading]) -> str:
    """One line for each claim of the paper, one column for each reading."""
    cells = pd.DataFrame(
        {reading.title: verdicts(frame, reading) for reading in readings}, index=list(CLAIMS)
    )
    return markdown.table(cells, "the paper says") + "\n"
