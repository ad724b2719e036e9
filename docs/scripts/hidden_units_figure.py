"""The hidden units of STORM+, drawn: ResNet34 beside non-convex logistic regression.

    python docs/scripts/hidden_units_figure.py [--draw-only]

Runs the logistic regressions (about a minute), writes
`docs/results/hidden_units_logistic.json` and `docs/figures/hidden_units.png`; the ResNet34
panels are read from `docs/results/hidden_units_resnet34.json` (see `hidden_units.py`).
`--draw-only` draws the committed numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stormplus import minimize
from stormplus.theory import remembered
from stormplus.theory.palette import PALETTE, WIDTH, shade
from stormplus.theory.problems import breast_cancer, digits_parity
from stormplus.theory.rates import versions
from stormplus.theory.rivals import minimize_finite_sum

DOCS = Path(__file__).parents[1]
LRS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SEEDS, STEPS, BATCH = 5, 3000, 16
RESULT = DOCS / "results" / "hidden_units_logistic.json"
# Of a line and of its colour, by lr: the hue says the method.
WEIGHTS, SHADES = {0.01: 1.0, 0.1: 1.6, 1.0: 2.4}, {0.01: 0.4, 0.1: 0.65, 1.0: 1.0}


def logistic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in (("breast cancer", breast_cancer), ("digits, parity", digits_parity)):
        problem = make(batch_size=BATCH)
        rows: dict[str, list[float]] = {"storm+": [], "sgd": []}
        for lr in LRS:
            plus = [
                minimize(problem.grad, problem.start(), problem.sample, STEPS, lr=lr, rng=seed).x
                for seed in range(SEEDS)
            ]
            budget = (2 * STEPS - 1) * BATCH  # as many gradients as STORM+ takes
            plain = [
                minimize_finite_sum(
                    problem, problem.start(), budget,
                    method="sgd", step_size=lr, batch_size=BATCH, rng=seed,
                ).x
                for seed in range(SEEDS)
            ]  # fmt: skip
            for key, points in (("storm+", plus), ("sgd", plain)):
                norms = [float(np.linalg.norm(problem.full_grad(x))) for x in points]
                rows[key].append(float(f"{np.mean(norms):.4g}"))
        found[name] = rows
        print(name, rows, flush=True)
    return found


def smooth(values: Any, width: int = 10) -> Any:
    return np.convolve(values, np.ones(width) / width, mode="valid")


def measure(resnet: dict[str, Any]) -> dict[str, Any]:
    found = logistic()
    return {
        "command": "python docs/scripts/hidden_units_figure.py",
        "seeds": SEEDS,
        "steps": STEPS,
        "batch": BATCH,
        "lr": LRS,
        "versions": versions(),
        "final gradient norm, mean over seeds": found,
        "largest over smallest, lr 0.3 to 10": {
            f"{name}, {key}": round(max(norms[2:6]) / min(norms[2:6]), 2)
            for name, rows in found.items()
            for key, norms in rows.items()
        },
        "ResNet34": [
            {
                "run": f"{run['name']}, lr {run['lr']:g}",
                "loss, mean of the last 20": round(
                    float(np.mean([row["loss"] for row in run["rows"][-20:]])), 3
                ),
                "weight of the first sample's error": round(
                    float(remembered(np.array([row.get("gain", 1.0) for row in run["rows"]]))[-1]),
                    4,
                ),
            }
            for run in resnet["runs"]
        ],
    }


def draw(resnet: dict[str, Any], found: dict[str, Any]) -> None:
    figure = Figure(figsize=(WIDTH, 7.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    loss, estimator = above.subplots(1, 2)
    lrs = below.subplots()
    for run in resnet["runs"]:
        rows = [row for row in run["rows"] if np.isfinite(row["loss"])]
        label = f"{run['name']}, lr {run['lr']:g}".replace("storm+", "STORM+").replace("sgd", "SGD")
        style: dict[str, Any] = {
            "color": shade(PALETTE[label.split(",")[0]], SHADES[run["lr"]]),
            "linestyle": ":" if run["name"] == "sgd" else "--" if "/" in run["name"] else "-",
            "linewidth": WEIGHTS[run["lr"]],
        }
        losses = smooth([row["loss"] for row in rows])
        loss.plot(np.arange(len(losses)) + 10, losses, label=label, **style)
        if "estimator_norm" in rows[0]:
            first = rows[0]["estimator_norm"]
            growth = [row["estimator_norm"] / first for row in rows]
            estimator.loglog(range(1, len(rows) + 1), growth, **style)
    loss.set(xlabel="samples t", ylabel="training loss, mean of 10", title="ResNet34, CIFAR-10")
    loss.set_ylim(1.2, None)  # room for the legend
    loss.legend(fontsize=7.5, loc="lower left", ncols=1)
    estimator.axhline(1, color="0.6", linewidth=0.8)
    estimator.set(
        xlabel="samples t", ylabel="$|d_t|\\,/\\,|d_1|$", title="the estimator's length, same runs"
    )
    for (name, rows), marker in zip(found["final gradient norm, mean over seeds"].items(), "ov"):
        fill = {"mfc": "white"} if marker == "v" else {}
        lrs.loglog(
            LRS,
            rows["storm+"],
            f"{marker}-",
            color=PALETTE["STORM+"],
            label=f"STORM+, {name}",
            **fill,
        )
        lrs.loglog(
            LRS,
            rows["sgd"],
            f"{marker}:",
            color=PALETTE["SGD"],
            label=f"SGD $1/\\sqrt{{t}}$, {name}",
            **fill,
        )
    lrs.axvspan(0.3, 10, color="0.5", alpha=0.1)
    lrs.set(
        xlabel="lr",
        ylabel=r"final $|\nabla f|$, mean of 5 seeds",
        title="non-convex logistic regression",
    )
    lrs.legend(fontsize=7.5)
    for axis in (loss, estimator, lrs):
        axis.grid(True, alpha=0.3)
        axis.title.set_fontsize(9)
    figure.savefig(DOCS / "figures" / "hidden_units.png", dpi=130)


def main() -> None:
    resnet = json.loads((DOCS / "results" / "hidden_units_resnet34.json").read_text())
    if "--draw-only" not in sys.argv:
        RESULT.write_text(json.dumps(measure(resnet), indent=1) + "\n")
    draw(resnet, json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main()
