"""The tables of the long runs, from their rows: `python benchmark/scripts/long.py ROWS...`."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

from stormplus_bench import finals, markdown, rows

COLUMNS = ("lr", "training loss", "validation loss", "validation accuracy", "ms a step", "state")


def main(paths: list[str]) -> None:
    if not paths:
        raise SystemExit("give the journals: python benchmark/scripts/long.py out/long/rows.jsonl")
    frame = rows.load_all(paths, on_cut="drop")
    for workload, part in frame.groupby("workload"):
        sys.stdout.write(f"\n### {workload}\n\n{markdown.table(table(part), 'method')}\n")


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """A line a method, at the rate of its lowest training loss, the lowest first.

    Numbers are means over the seeds.
    """
    best = finals.tuned(frame)[["method", "lr"]].itertuples(index=False)
    found = {}
    for method, lr in best:
        runs = frame[(frame["method"] == method) & (frame["lr"] == lr)]
        ends = runs.groupby("seed").last()
        steps = runs.groupby("seed")["seconds"].max() / runs.groupby("seed")["samples"].max()
        bad = (ends["status"] == "diverged").any()
        found[method] = {
            "lr": f"{lr:g}",
            "training loss": np.inf if bad else ends["train_loss"].mean(),
            "validation loss": ends["valid_loss"].mean(),
            "validation accuracy": ends["valid_accuracy"].mean(),
            "ms a step": f"{1e3 * steps.mean():.1f}",
            "state": f"{ends['state_mb'].mean():.2f} MB",
        }
    made = pd.DataFrame.from_dict(found, orient="index", columns=list(COLUMNS))
    made = made.sort_values("training loss", kind="stable")
    for name in ("training loss", "validation loss"):
        made[name] = [_number(value, "{:.4g}") for value in made[name]]
    made["validation accuracy"] = [_number(v, "{:.1%}") for v in made["validation accuracy"]]
    return made


def _number(value: float, form: str) -> str:
    if np.isnan(value):
        return ""
    return "diverged" if np.isinf(value) else form.format(value)


if __name__ == "__main__":
    main(sys.argv[1:])
