"""Where a second gradient pays: a finite sum with a full refresh.

    python research/finite_sum.py

Non-convex logistic regression on breast-cancer data (n = 569), 5 seeds, 100 passes' worth of
gradients of single data points; anchors, mega-batches and both gradients of a difference count. The
score is the mean of |grad f| over the last tenth of the budget, at the step size of the method's
theory (STORM+: lr 1) and at the best of a grid, tuned on 2 other seeds. Writes
docs/results/finite_sum.json and docs/figures/finite_sum.png; two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import COLORS, DOCS, WIDTH, parser, save, versions
from matplotlib.figure import Figure
from rivals import minimize_finite_sum

from stormplus import minimize
from stormplus.theory.problems import breast_cancer

PASSES, SEEDS, TUNING_SEEDS, BATCH = 100, range(5), range(100, 102), 8
STEP_SIZES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
PROBLEM = breast_cancer(batch_size=BATCH)
BUDGET = PASSES * PROBLEM.n_samples
GRID = np.geomspace(PROBLEM.n_samples / 4, BUDGET, 60)
See = Callable[[Any], None]


def storm_plus(step_size: float | None, seed: int, see: See) -> Any:
    steps = (BUDGET // BATCH + 1) // 2  # 2T - 1 batches
    lr = 1.0 if step_size is None else step_size

    def report(result: Any) -> None:
        see(SimpleNamespace(x=result.x, ngev=BATCH * result.ngev))

    return minimize(
        PROBLEM.grad, PROBLEM.start(), PROBLEM.sample, steps, lr=lr, rng=seed, callback=report
    )


def rival(step_size: float | None, seed: int, see: See, *, method: str) -> Any:
    tuned = {} if step_size is None or method == "spider" else {"batch_size": BATCH}
    return minimize_finite_sum(
        PROBLEM, PROBLEM.start(), BUDGET,
        method=method, step_size=step_size, rng=seed, callback=see, **tuned,
    )  # fmt: skip


def one_gradient(step_size: float | None, seed: int, see: See, *, adam: bool) -> Any:
    """SGD with steps of step_size / sqrt(t), or Adam at a constant rate."""
    rng, x, mean, square = np.random.default_rng(seed), PROBLEM.start(), 0.0, 0.0
    step_size = (1e-3 if adam else 1.0) if step_size is None else step_size
    for t in range(1, BUDGET // BATCH + 1):
        g = PROBLEM.grad(x, PROBLEM.sample(rng))
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        scaled = (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
        x = x - (step_size * scaled if adam else step_size / t**0.5 * g)
        see(SimpleNamespace(x=x, ngev=t * BATCH))
    return SimpleNamespace(success=True)


METHODS: dict[str, Callable[..., Any]] = {
    "SPIDER": partial(rival, method="spider"),
    "SVRG": partial(rival, method="svrg"),
    "SCSG": partial(rival, method="scsg"),
    "hybrid SARAH": partial(rival, method="hybrid-sarah"),
    "STORM+": storm_plus,
    "SGD": partial(one_gradient, adam=False),
    "Adam": partial(one_gradient, adam=True),
}


def curve(method: Callable[..., Any], step_size: float | None, seed: int) -> Any:
    """Return |grad f| of the iterate at each budget of GRID; NaN if the run diverged."""
    spent, norms = [0], [float(np.linalg.norm(PROBLEM.full_grad(PROBLEM.start())))]

    def see(result: Any) -> None:
        if result.ngev > spent[-1] + BUDGET / 1000:
            spent.append(result.ngev)
            norms.append(float(np.linalg.norm(PROBLEM.full_grad(result.x))))

    if not method(step_size, seed, see).success:
        return np.full(len(GRID), np.nan)
    return np.array(norms)[np.searchsorted(spent, GRID, side="right") - 1]


def score(curves: Any) -> float:
    tail = np.asarray(curves)[:, GRID >= 0.9 * BUDGET]
    return float("inf") if np.isnan(tail).any() else float(tail.mean())


def main() -> None:
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axis, rows = figure.subplots(), []
    others = ["#1098ad", "#868e96", "#66a80f", "#9c36b5"]
    for (name, method), color in zip(METHODS.items(), [*others, None, None, None]):
        tuned = {s: score([curve(method, s, k) for k in TUNING_SEEDS]) for s in STEP_SIZES}
        best = min(tuned, key=lambda s: tuned[s])
        plain = score([curve(method, None, seed) for seed in SEEDS])
        curves = np.array([curve(method, best, seed) for seed in SEEDS])
        rows.append({"method": name, "default": plain, "best step": best, "tuned": score(curves)})
        print(rows[-1], flush=True)
        shown = np.exp(np.log(curves).mean(0))
        axis.loglog(GRID / PROBLEM.n_samples, shown, color=color or COLORS[name], label=name)
    axis.set(xlabel="passes over the data", ylabel=r"$|\nabla f|$, tuned, mean of 5 seeds")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(DOCS / "figures" / "finite_sum.png", dpi=130)
    save("finite_sum.json", {"passes": PASSES, "rows": rows, "versions": versions()})


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
