"""The tables of the long runs: `make long`, or `python benchmark/scripts/long.py ROWS...`.

Without rows, those of docs/results are read, and the tables go into docs/benchmark.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from stormplus_bench import finals, markdown, paper_tables, rows
from stormplus_bench.methods import TIERS, ordered

COLUMNS = ("lr", "training loss", "validation loss", "validation accuracy", "state")
FOLDER = Path("docs")
PARTS = ("long", "long-held-out")
HELD_OUT = ("vit-cifar10", "lora-cifar10")


def main(paths: list[str]) -> None:
    if paths:
        sys.stdout.write(report(rows.load_all(tuple(paths), on_cut="drop")) + "\n")
        return
    found = [FOLDER / "results" / f"{name}.jsonl.gz" for name in PARTS]
    text = report(rows.load_all(tuple(path for path in found if path.exists()), on_cut="drop"))
    page = FOLDER / "benchmark.md"
    content = markdown.replace(page.read_text(encoding="utf-8"), text, "long", str(page))
    page.write_text(content, encoding="utf-8")
    sys.stdout.write(text + "\n")


def report(frame: pd.DataFrame) -> str:
    """Where each method ends, first over all workloads, then on each."""
    diverged = int(np.isinf(finals.per_run(frame)["loss"]).sum())
    parts = [paper_tables.where(frame).strip(), f"Runs that diverged: {diverged}.", missing(frame)]
    parts += [markdown.table(lost(frame), "method"), markdown.wrap(LOST)]
    for workload in [name for name in TIERS["long"] if name in set(frame["workload"])]:
        part = frame[frame["workload"] == workload]
        held = ", held out" if workload in HELD_OUT else ""
        parts += [f"#### {workload}{held}", markdown.table(table(part), "method")]
    return "\n\n".join(part for part in parts if part)


LOST = (
    "Part of the possible decrease of the training loss, from its start to the best end of all "
    "methods, that a method leaves on the table, in per cent; means over the seeds. Methods over "
    "five rates are at their best one, chosen on the same seeds, which flatters them."
)


def missing(frame: pd.DataFrame) -> str:
    """Which workloads have no rows yet, and which have some settings with fewer seeds."""
    seeds = frame.groupby(["workload", "method", "lr"])["seed"].nunique()
    fewest = seeds.groupby("workload").min()
    absent = [name for name in TIERS["long"] if name not in fewest]
    partly = [name for name in TIERS["long"] if fewest.get(name, np.inf) < seeds.max()]
    told = {"Not run yet": absent, "Not with every seed yet": partly}
    return " ".join(f"{title}: {', '.join(names)}." for title, names in told.items() if names)


def lost(frame: pd.DataFrame) -> pd.DataFrame:
    """By method and workload: (loss - best) / (initial - best), in per cent."""
    runs = finals.per_run(frame)
    ends = runs.groupby(["workload", "method", "lr"], as_index=False).agg(
        loss=("loss", "mean"), initial=("initial", "mean")
    )
    best = ends.groupby(["workload", "method"], as_index=False).agg(
        loss=("loss", "min"), initial=("initial", "first")
    )
    lowest = best.groupby("workload")["loss"].transform("min")
    best["lost"] = 100 * (best["loss"] - lowest) / (best["initial"] - lowest)
    grid = best.pivot(index="method", columns="workload", values="lost")
    grid = grid.reindex(columns=[name for name in TIERS["long"] if name in grid.columns])
    grid["mean"] = grid.mean(axis=1, skipna=False)
    grid = grid.reindex(ordered(grid.index)).sort_values("mean", kind="stable")
    return grid.map(_per_cent)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """A line a method, at the rate of its lowest training loss, the lowest first.

    Numbers are means over the seeds.
    """
    best = finals.tuned(frame)[["method", "lr"]].itertuples(index=False)
    found = {}
    for method, lr in best:
        runs = frame[(frame["method"] == method) & (frame["lr"] == lr)]
        ends = runs.groupby("seed").last()
        bad = (ends["status"] == "diverged").any()
        found[method] = {
            "lr": f"{lr:g}",
            "training loss": np.inf if bad else ends["train_loss"].mean(),
            "validation loss": ends["valid_loss"].mean(),
            "validation accuracy": ends["valid_accuracy"].mean(),
            "state": f"{ends['state_mb'].mean():.2f} MB",
        }
    made = pd.DataFrame.from_dict(found, orient="index", columns=list(COLUMNS))
    made = made.sort_values("training loss", kind="stable")
    for name in ("training loss", "validation loss"):
        made[name] = [_number(value, "{:.4g}") for value in made[name]]
    made["validation accuracy"] = [_number(v, "{:.1%}") for v in made["validation accuracy"]]
    return made


def _per_cent(value: float) -> str:
    return _number(value, "{:.1f}")


def _number(value: float, form: str) -> str:
    if np.isnan(value):
        return ""
    return "diverged" if np.isinf(value) else form.format(value)


if __name__ == "__main__":
    main(sys.argv[1:])
