"""Variance reduction in one plot, and what watching costs.

    python docs/scripts/variance_reduction.py

Writes `docs/figures/variance_reduction.png` and `docs/results/observer_cost.json`.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from stormplus import StormPlus, minimize
from stormplus.theory import Observer
from stormplus.theory.palette import WIDTH
from stormplus.theory.problems import breast_cancer
from stormplus.theory.rates import versions

DOCS = Path(__file__).parents[1]


def draw() -> None:
    problem = breast_cancer(batch_size=4)
    observer = Observer(problem.full_grad, window=300)
    minimize(
        observer.watch(problem.grad),
        problem.start(),
        problem.sample,
        20_000,
        lr=0.3,
        rng=0,
        callback=observer,
    )
    rows = {key: np.array([row[key] for row in observer.rows[1:]]) for key in observer.latest}
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    errors, others = figure.subplots(1, 2)
    edges = np.unique(np.geomspace(2, 20_000, 61).round().astype(int)) - 2
    bins = [slice(low, high) for low, high in pairwise(edges)]
    middle = [rows["step"][b].mean() for b in bins]
    for key, label, colour in (
        ("true_noise_sq", r"$|g_t-\nabla f(x_t)|^2$, one sample", "#0072B2"),
        ("true_error_sq", r"$|d_t-\nabla f(x_t)|^2$, the estimator", "#D55E00"),
    ):
        errors.loglog(middle, [rows[key][b].mean() for b in bins], color=colour, label=label)
    for key, label, colour, marker in (
        ("noise_sq", r"estimate of $\sigma^2$, no full gradient", "#56B4E9", "o"),
        ("error_sq", r"estimate of $|\epsilon_t|^2$ (negative ones left out)", "#E69F00", "s"),
    ):
        ends = [rows[key][b][-1] for b in bins]
        shown = [value if value > 0 else np.nan for value in ends]
        errors.loglog(middle, shown, marker, color=colour, markersize=4, label=label)
    errors.set(xlabel="samples t", title="variance reduction (means over log-spaced bins)")
    errors.set_ylim(1e-5, 10)
    errors.legend(fontsize=8, loc="lower left")
    for key, label, colour in (
        ("gain", "gain $a_{t+1}$", "#D55E00"),
        ("step_size", r"step size $\eta_t$", "#0072B2"),
        ("smoothness", "L along the path", "#009E73"),
    ):
        others.loglog(rows["step"], rows[key], color=colour, label=label)
    bound = problem.constants.smoothness
    others.axhline(bound, color="#009E73", linestyle=":", label=f"the bound L = {bound:.0f}")
    others.set(xlabel="samples t", title="the same run: gain, step size, smoothness")
    others.legend(fontsize=8)
    for axis in (errors, others):
        axis.grid(True, alpha=0.3)
        axis.title.set_fontsize(9)
    figure.savefig(DOCS / "figures" / "variance_reduction.png", dpi=130)


def numpy_seconds(steps: int, watched: bool) -> float:
    problem, observer = breast_cancer(batch_size=4), Observer()
    grad = observer.watch(problem.grad) if watched else problem.grad
    start = time.perf_counter()
    minimize(
        grad, problem.start(), problem.sample, steps, rng=0, callback=observer if watched else None
    )
    return (time.perf_counter() - start) / steps


def torch_seconds(steps: int, watched: bool) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    x, y = torch.randn(128, 784), torch.randint(10, (128,))
    optimizer = StormPlus(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    attachment = Observer().attach(optimizer) if watched else None
    optimizer.step(closure)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step(closure)
    seconds = (time.perf_counter() - start) / steps
    if attachment is not None:
        attachment.close()
    return seconds


def main() -> None:
    draw()
    if "--draw-only" in sys.argv:
        return
    torch.set_num_threads(1)
    rows = []
    for name, measure, steps in (
        ("minimize, 31 unknowns", numpy_seconds, 2000),
        ("StormPlus, an MLP of 0.8 million parameters, batch 128", torch_seconds, 40),
    ):
        pairs = [(measure(steps, False), measure(steps, True)) for _ in range(5)]
        off, on = (float(np.median([pair[i] for pair in pairs])) for i in (0, 1))
        rows.append(
            {
                "what": name,
                "ms a step, off": round(1e3 * off, 3),
                "ms a step, on": round(1e3 * on, 3),
                "ratio": round(on / off, 2),
            }
        )
        print(rows[-1], flush=True)
    result = {
        "command": "python docs/scripts/variance_reduction.py",
        "versions": versions() | {"torch": torch.__version__},
        "machine": f"{platform.machine()}, 1 thread; median of 5",
        "rows": rows,
    }
    (DOCS / "results" / "observer_cost.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
