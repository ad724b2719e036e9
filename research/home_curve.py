"""Draw the figure of the home page from the committed rows of the benchmark.

    python research/home_curve.py

Training loss of a character GPT (the workload gpt-shakespeare) against steps, with one gradient
each. Lines are medians over the seeds, bands run from the lowest to the highest.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np
from common import DOCS, WIDTH, parser
from matplotlib.figure import Figure

WORKLOAD = "gpt-shakespeare"
LINES = (  # method, learning rate, label, color
    ("Adam", 0.001, "Adam, lr 0.001 (default)", "#9ecbf0"),
    ("Adam", 0.00316, "Adam, lr 0.00316", "#1971c2"),
    ("Adam", 0.01, "Adam, lr 0.01", "#0b3a66"),
    ("Schedule-Free", 0.0025, "Schedule-Free AdamW, lr 0.0025 (default)", "#b08900"),
    ("Untuned", 1.0, "Untuned, nothing set", "#087f5b"),
)


def rows() -> list[dict[str, Any]]:
    found = []
    for name in ("networks", "untuned"):
        with gzip.open(DOCS / "results" / f"{name}.jsonl.gz", "rt") as file:
            found += [json.loads(line) for line in file]
    return [row for row in found if row.get("workload") == WORKLOAD]


def main() -> None:
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    for method, lr, label, color in LINES:
        curves = [r["curve"] for r in rows() if (r["method"], r["lr"]) == (method, lr)]
        steps = curves[0]["evaluations"]
        losses = np.array([curve["train_loss"] for curve in curves])
        width = 2.6 if method == "Untuned" else 1.5
        axes.plot(steps, np.median(losses, axis=0), color=color, label=label, linewidth=width)
        axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.15)
        print(f"{label}: {np.median(losses[:, -1]):.3f}, {len(curves)} seeds")
    axes.set(xlabel="step", ylabel="training loss", ylim=(1.9, 4.3), xlim=(0, 1000))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(DOCS / "figures" / "home.png", dpi=160)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
