"""The variance-reduction rivals on one axis: gradients of single data points.

    python docs/scripts/rivals.py

Non-convex logistic regression on breast-cancer data, 5 seeds, 100 passes' worth of gradients,
anchors and mega-batches included. Each rival with the step size its theory prescribes and with
the best of a grid; STORM+ at lr 1 and with the best of a grid. The score is the mean of |grad f|
over the last tenth of the budget. Writes `docs/results/rivals.json` and
`docs/figures/rivals.png`; some minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stormplus import minimize
from stormplus.theory.palette import PALETTE, WIDTH
from stormplus.theory.problems import breast_cancer
from stormplus.theory.rates import versions
from stormplus.theory.rivals import minimize_finite_sum

DOCS = Path(__file__).parents[1]
PASSES, SEEDS, TUNING_SEEDS = 100, range(5), range(100, 102)
STEP_SIZES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BATCH = 8  # of STORM+ and of the rivals' tuned runs; theory prescribes its own
NAMES = {
    "storm+": "STORM+",
    "svrg": "SVRG",
    "scsg": "SCSG",
    "spider": "SPIDER",
    "hybrid-sarah": "Hybrid SARAH",
}
PROBLEM = breast_cancer(batch_size=BATCH)
BUDGET = PASSES * PROBLEM.n_samples
GRID = np.geomspace(PROBLEM.n_samples / 4, BUDGET, 60)


def watch(run: Callable[[Callable[[Any], None]], Any], cost: int = 1) -> Any:
    """|grad f| of the iterate at each budget of GRID; the watching is not counted."""
    spent, norms = [0], [float(np.linalg.norm(PROBLEM.full_grad(PROBLEM.start())))]

    def see(result: Any) -> None:
        if result.ngev * cost > spent[-1] + BUDGET / 1000:
            spent.append(result.ngev * cost)
            norms.append(float(np.linalg.norm(PROBLEM.full_grad(result.x))))

    final = run(see)
    if not getattr(final, "success", True):
        return np.full(len(GRID), np.nan)
    return np.array(norms)[np.searchsorted(spent, GRID, side="right") - 1]


def storm_plus(lr: float, seed: int) -> Any:
    steps = (BUDGET // BATCH + 1) // 2  # 2T - 1 batches
    start = PROBLEM.start()

    def run(see: Callable[[Any], None]) -> Any:
        return minimize(PROBLEM.grad, start, PROBLEM.sample, steps, lr=lr, rng=seed, callback=see)

    return watch(run, BATCH)


def rival(method: str, step_size: float | None, seed: int) -> Any:
    options = {} if step_size is None or method == "spider" else {"batch_size": BATCH}

    def run(see: Callable[[Any], None]) -> Any:
        return minimize_finite_sum(
            PROBLEM,
            PROBLEM.start(),
            BUDGET,
            method=method,
            step_size=step_size,
            rng=seed,
            callback=see,
            **options,
        )

    return watch(run)


def score(curves: Any) -> float:
    """The mean over seeds and the last tenth of the budget; a divergence counts as inf."""
    tail = np.asarray(curves)[:, GRID >= 0.9 * BUDGET]
    return float("inf") if np.isnan(tail).any() else float(tail.mean())


def main() -> None:
    runs: dict[str, Callable[[Any, int], Any]] = {"storm+": storm_plus}
    for method in list(NAMES)[1:]:
        runs[method] = lambda size, seed, method=method: rival(method, size, seed)
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    rows = []
    for name, run in runs.items():
        grid = LRS if name == "storm+" else STEP_SIZES
        scores = {size: score([run(size, seed) for seed in TUNING_SEEDS]) for size in grid}
        best = min(scores, key=lambda size: scores[size])
        for axis, kind, size in (
            (panels[0], "theory", 1.0 if name == "storm+" else None),
            (panels[1], "tuned", best),
        ):
            curves = np.array([run(size, seed) for seed in SEEDS])
            row = {"method": name, "step size": kind, "value": size, "score": score(curves)}
            rows.append(row | ({"grid": list(grid)} if kind == "tuned" else {}))
            print(rows[-1], flush=True)
            low, middle, high = np.quantile(curves, (0.1, 0.5, 0.9), axis=0)
            colour = PALETTE[NAMES[name]]
            label = NAMES[name] + (f", {size:g}" if kind == "tuned" else "")
            axis.loglog(GRID, middle, color=colour, label=label)
            axis.fill_between(GRID, low, high, color=colour, alpha=0.2, linewidth=0)
    panels[0].set_title("step sizes of each method's own theory; STORM+: lr 1")
    panels[1].set_title(f"tuned step sizes (batches of {BATCH}; SPIDER: 24)")
    panels[0].set_ylabel(r"$|\nabla f|$: median, 10 to 90 % of 5 seeds")
    for axis in panels:
        axis.axvline(PROBLEM.n_samples, color="0.6", linewidth=0.8)
        axis.set_xlabel("gradients of single data points (grey line: one pass)")
        axis.grid(True, alpha=0.3)
        axis.title.set_fontsize(9)
        axis.xaxis.label.set_fontsize(8)
        axis.legend(fontsize=8)
    figure.savefig(DOCS / "figures" / "rivals.png", dpi=130)
    for row in rows:
        row["score"] = float(f"{row['score']:.3g}")
    result = {
        "command": "python docs/scripts/rivals.py",
        "problem": "breast_cancer, n = 569",
        "passes": PASSES,
        "seeds": len(SEEDS),
        "versions": versions(),
        "rows": rows,
    }
    (DOCS / "results" / "rivals.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
