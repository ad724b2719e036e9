"""The paper's rates, measured: E|grad f(x_bar_T)| against T and sigma.

    python research/rates.py                 run what is missing, print the table, draw the figure
    python research/rates.py storm+ sgd      run these methods again
    python research/rates.py --quick         seconds instead of minutes; writes nothing

The problem meets every assumption of the paper with known constants. No method but Ada-STORM uses
T, so one run to the largest T gives every smaller one. The expectation over the random index of
x_bar_T is the exact mean over x_1..x_T; only the samples are random. All noise levels and seeds
run side by side: arrays have the axes (sigma, seed, coordinate). Each method is stored in
docs/results/rates_summary.json when it ends; a million samples take one to two minutes on a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from common import COLORS, DOCS, WIDTH, load, parser, save, versions
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stormplus.rules import AdaStormRule, Rule, StormPlusRule, Sums, make_rule
from stormplus.theory.problems import BoundedNonConvex

Array: TypeAlias = NDArray[np.float64]
RESULT = "rates_summary.json"


class Plan(NamedTuple):
    """What is run; fixed before anything is."""

    steps: int = 1_000_000
    seeds: tuple[int, ...] = tuple(range(20))
    sigmas: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    window: tuple[int, int] = (10_000, 1_000_000)  # the T over which slopes are fitted
    tuning_steps: int = 100_000
    tuning_seeds: tuple[int, ...] = (1000, 1001, 1002, 1003, 1004)
    grid: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # SGD's lr, at each sigma

    @property
    def checkpoints(self) -> NDArray[np.int64]:
        """Five T per decade, from 100."""
        count = round(np.log10(self.steps / 100) * 5) + 1
        return np.geomspace(100, self.steps, count).round().astype(np.int64)


FULL = Plan()
QUICK = Plan(3_000, tuple(range(6)), (0.0, 0.1, 1.0), (300, 3_000), 500, (1000, 1001))


class Gradients:
    """Gradients of all runs at once; the signs of a sample come from one stream per seed."""

    def __init__(self, problem: BoundedNonConvex, seeds: tuple[int, ...], steps: int) -> None:
        self.problem, self.signs = problem, _signs(seeds, problem.dim, steps)
        self.at: Array | None = None

    def draw(self) -> tuple[Array, Array]:
        return next(self.signs)

    def slopes(self, x: Array) -> tuple[Array, Array]:
        if x is not self.at:  # all gradients at one x share the slopes
            self.at, self.at_slopes = x, self.problem.slopes(x)
        return self.at_slopes

    def grad(self, x: Array, xi: Any) -> Array:
        return self.problem.grad_from_slopes(self.slopes(x), xi)

    def full_norm(self, x: Array) -> Array:
        """|grad f(x)| of every run."""
        norm: Array = np.sqrt(square_norm(self.problem.height * self.slopes(x)[0]))
        return norm


def _signs(seeds: tuple[int, ...], dim: int, steps: int) -> Iterator[tuple[Array, Array]]:
    streams = [np.random.default_rng([seed, 1]) for seed in seeds]
    for start in range(0, steps, 1024):
        size = (min(1024, steps - start), 2, dim)
        bits = [stream.integers(2, size=size, dtype=np.int8) for stream in streams]
        for step in 2.0 * np.stack(bits, axis=2) - 1:  # which, seed, coordinate
            yield step[0], step[1]


def square_norm(v: Array) -> Any:
    return np.einsum("...i,...i->...", v, v)


# A method yields the point that it would return after each sample, from the second on.
Method: TypeAlias = Callable[[Gradients, Array], Iterator[Array]]


def corrected_momentum(
    gradients: Gradients,
    x: Array,
    *,
    rule: Rule,
    lr: Any = 1.0,
    unit: Any = 1.0,
    corrected: bool = True,
) -> Iterator[Array]:
    """Algorithm 1 with one of the library's rules; without the correction, plain momentum."""
    d = g = gradients.grad(x, gradients.draw())  # Alg. 1, line 1
    sums, t, unit_sq = Sums(), 1, np.square(unit)
    scale = np.asarray(lr / unit)
    while True:
        g_sq, d_sq = square_norm(g) / unit_sq, square_norm(d) / unit_sq
        sums, a, eta = rule(sums, g_sq, d_sq, t)  # Alg. 1, line 3
        a = np.asarray(a)[..., None]
        x_old, x = x, x - (scale * eta)[..., None] * d  # Alg. 1, line 4
        xi, t = gradients.draw(), t + 1
        if corrected:
            g_tilde, g = gradients.grad(x_old, xi), gradients.grad(x, xi)  # Alg. 1, line 5
            d = g + (1 - a) * (d - g_tilde)  # Alg. 1, line 6
        else:
            g = gradients.grad(x, xi)
            d = a * g + (1 - a) * d
        yield x


def sgd(gradients: Gradients, x: Array, *, lr: Array, average: bool = False) -> Iterator[Array]:
    """x_{t+1} = x_t - lr g_t / sqrt(t); yields x, or its polynomial average of degree 8."""
    t, mean = 0, x
    while True:
        t += 1
        x = x - lr[..., None] / t**0.5 * gradients.grad(x, gradients.draw())
        mean = mean + 9 / (t + 9) * (x - mean)
        yield mean if average else x


def adagrad_norm(gradients: Gradients, x: Array) -> Iterator[Array]:
    """x_{t+1} = x_t - g_t / sqrt(1 + sum_{i<=t} |g_i|^2)."""
    total = 1.0
    while True:
        g = gradients.grad(x, gradients.draw())
        total = total + square_norm(g)
        x = x - g / np.sqrt(total)[..., None]
        yield x


def storm_constants(smoothness: float, grad_bound: float, b: float) -> dict[str, float]:
    """Return STORM's constants of Theorem 1 of Cutkosky & Orabona (2019), for a free b > 0.

    k = b G^(2/3) / L, c = 28 L^2 + G^2 / (7 L k^3), w = max((4 L k)^3, 2 G^2, (c k / (4 L))^3).
    """
    k = b * grad_bound ** (2 / 3) / smoothness
    c = 28 * smoothness**2 + grad_bound**2 / (7 * smoothness * k**3)
    w = max((4 * smoothness * k) ** 3, 2 * grad_bound**2, (c * k / (4 * smoothness)) ** 3)
    return {"theta": k, "w": w, "c": c / smoothness**2, "smoothness": smoothness}


def measure(
    method: Method, problem: BoundedNonConvex, seeds: tuple[int, ...], checkpoints: Any
) -> tuple[Array, Array, Array]:
    """Return the mean, the RMS and the last |grad f| of x_1..x_T at each checkpoint T, per run."""
    steps, wanted = int(checkpoints[-1]), set(np.asarray(checkpoints).tolist())
    start = np.stack([problem.start(np.random.default_rng([seed, 0])) for seed in seeds])
    axes = np.broadcast_shapes(problem.sigma.shape, (len(seeds),))
    x = np.broadcast_to(start, (*axes, problem.dim))
    gradients = Gradients(problem, seeds, steps)
    total = square = np.zeros(axes)
    found = []
    for t, point in enumerate(chain([x], method(gradients, x)), start=1):
        norm = gradients.full_norm(point)
        total, square = total + norm, square + norm * norm
        if t in wanted:
            found.append((total / t, np.sqrt(square / t), norm))
        if t == steps:
            break
    mean, rms, last = (np.array(part) for part in zip(*found))
    return mean, rms, last


def run(name: str, plan: Plan) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    """Run one method on all seeds and noise levels, after tuning SGD's learning rate."""
    problem = BoundedNonConvex(10, np.array(plan.sigmas)[:, None])
    noisy = BoundedNonConvex(10, plan.sigmas[-1]).constants
    tuning: dict[str, Any] = {}
    if name == "ada-storm":  # one run per horizon
        horizons = [T for T in plan.checkpoints if T in (100, 1000, 10_000, 100_000, 1_000_000)]
        runs = [
            measure(partial(corrected_momentum, rule=AdaStormRule(T)), problem, plan.seeds, [T])
            for T in horizons
        ]
        mean, rms, last = (np.concatenate(part) for part in zip(*runs))
        return (mean, rms, last), {"T": [int(T) for T in horizons]}
    method: Method
    if name.startswith("sgd"):
        plain = partial(sgd, average=name == "sgd-average")
        lrs, score = np.array(plan.grid), 2 if name == "sgd-average" else 0
        candidates = partial(plain, lr=lrs[:, None, None])
        last_T = np.array([plan.tuning_steps])
        many = BoundedNonConvex(
            10, np.broadcast_to(problem.sigma, (len(lrs), *problem.sigma.shape))
        )
        scores = measure(candidates, many, plan.tuning_seeds, last_T)[score][0].mean(-1)
        best = lrs[scores.argmin(0)]
        tuning, method = {"lr": best.tolist()}, partial(plain, lr=best[:, None])
    elif name == "adagrad-norm":
        method = adagrad_norm
    elif name == "no-correction":
        method = partial(corrected_momentum, rule=StormPlusRule(), corrected=False)
    elif name == "storm":  # b = 0.1 was the best of 0.03, 0.1, 0.2, 0.5, 1 and 2
        assert noisy.smoothness is not None
        assert noisy.grad_bound is not None
        constants = storm_constants(noisy.smoothness, noisy.grad_bound, 0.1)
        method = partial(corrected_momentum, rule=make_rule("storm", **constants))
    else:
        method = partial(corrected_momentum, rule=make_rule(name))
    return measure(method, problem, plan.seeds, plan.checkpoints), tuning


class Entry(NamedTuple):
    """How a method is shown; exponents of T that theory proves, None where there is no theorem."""

    label: str
    with_noise: float | None
    without: float | None
    cost: int  # gradients per sample
    style: str  # marker and line
    color: str


METHODS = {
    "storm+": Entry("STORM+", -1 / 3, -1 / 2, 2, "o-", COLORS["STORM+"]),
    "simplified-storm+": Entry(
        "simplified STORM+", -1 / 3, -1 / 3, 2, "s-", COLORS["simplified STORM+"]
    ),
    "storm": Entry("STORM (L, G known, b tuned)", -1 / 3, -1 / 2, 2, "^-", COLORS["STORM"]),
    "sgd": Entry("SGD (1/sqrt(t), tuned)", -1 / 4, -1 / 4, 1, "v-", COLORS["SGD"]),
    "sgd-average": Entry("SGD (tuned), polynomial average", None, None, 1, "v--", COLORS["SGD"]),
    "adagrad-norm": Entry("AdaGrad-norm", -1 / 4, -1 / 2, 1, "D-", COLORS["AdaGrad-norm"]),
    "no-correction": Entry(
        "STORM+ without the correction", None, -1 / 2, 1, "x:", COLORS["STORM+"]
    ),
    "meta-storm-sg": Entry("META-STORM-SG", -1 / 3, -1 / 2, 2, "P:", "#0b7285"),
    "meta-storm-na": Entry("META-STORM-NA", -1 / 3, -1 / 3, 2, "X:", "#5c940d"),
    "normalized-storm": Entry("normalized STORM", -1 / 3, -1 / 3, 2, "*:", "#1971c2"),
    "ada-storm": Entry("Ada-STORM (T known)", -1 / 3, -1 / 3, 2, "h:", "#a61e4d"),
}


def slope(T: Any, runs: Array, window: tuple[int, int]) -> list[float]:
    """Return the slope of log(mean over seeds) against log T, and its 95 % bootstrap interval.

    Seeds are resampled whole, because the points of one curve are not independent.
    """
    T = np.asarray(T)
    inside = (window[0] <= T) & (window[1] >= T)
    if inside.sum() < 2:
        return [float("nan")] * 3
    log_t = np.log(T[inside])
    weights = (log_t - log_t.mean()) / np.square(log_t - log_t.mean()).sum()
    chosen = runs[inside]
    count = chosen.shape[1]
    picks = np.random.default_rng(0).integers(count, size=(1000, count))
    curves = np.vstack([chosen.mean(1), chosen[:, picks].mean(2).T])  # row 0: the sample itself
    slopes = np.log(curves) @ weights
    return [round(float(v), 3) for v in (slopes[0], *np.quantile(slopes[1:], [0.025, 0.975]))]


def summarise(name: str, plan: Plan) -> dict[str, Any]:
    """Run a method; return its slopes, and its means over seeds at each sigma and T."""
    begin = time.perf_counter()
    (mean, rms, last), tuning = run(name, plan)
    T = tuning.pop("T", plan.checkpoints.tolist())
    output = last if name == "sgd-average" else mean  # an average is one point, not a random one
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "versions": versions(),
        "tuning": tuning,
        "slopes": {
            f"sigma {sigma:g}": slope(T, output[:, j], plan.window)
            for j, sigma in enumerate(plan.sigmas)
        },
        "rms slope, sigma 0": slope(T, rms[:, 0], plan.window),
        "T": T,
        "sigma": list(plan.sigmas),
        **{
            key: [[float(f"{v:.4g}") for v in row] for row in values.mean(-1).T]
            for key, values in (("mean", mean), ("rms", rms), ("last", last))
        },
    }


def at(found: dict[str, Any], sigma: float, T: float, key: str = "mean") -> float:
    """Return a value at any T, interpolated between checkpoints on log scales."""
    values = found[key][found["sigma"].index(sigma)]
    return float(np.exp(np.interp(np.log(T), np.log(found["T"]), np.log(values))))


def table(results: dict[str, Any], plan: Plan) -> str:
    """Return slopes beside theory, and |grad f| after equal numbers of gradients, as Markdown."""
    top, noisy = plan.steps, plan.sigmas[-1]
    lines = [
        "| method | slope, sigma = 1 | theory | RMS slope, sigma = 0 | theory "
        f"| output, {top // 10:,} gradients | {top:,} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (label, with_noise, without, cost, _, _) in METHODS.items():
        if name not in results:
            continue
        found = results[name]
        value, low, high = found["slopes"][f"sigma {noisy:g}"]
        theory = ["" if power is None else f"{power:.3f}" for power in (with_noise, without)]
        key = "last" if name == "sgd-average" else "mean"
        outputs = [
            f"{at(found, noisy, spent / cost, key):.4f}" if spent <= cost * found["T"][-1] else ""
            for spent in (top / 10, top)
        ]
        lines.append(
            f"| {label} | {value:.3f} [{low:.3f}, {high:.3f}] | {theory[0]} "
            f"| {found['rms slope, sigma 0'][0]:.3f} | {theory[1]} | {' | '.join(outputs)} |"
        )
    lines += ["", "Ratio to STORM+ (mean over the iterates) after equal numbers of gradients:", ""]
    lines.append("| sigma | " + " | ".join(f"{sigma:g}" for sigma in plan.sigmas) + " |")
    lines.append("|---" * (len(plan.sigmas) + 1) + "|")
    for name in ("adagrad-norm", "sgd"):
        if {name, "storm+"} <= set(results):
            ratios = [
                at(results["storm+"], s, top / 2) / at(results[name], s, top) for s in plan.sigmas
            ]
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| STORM+ / {METHODS[name].label} | {cells} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], plan: Plan) -> None:
    """Draw |grad f| against the number of gradients, with and without noise, and against sigma."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    noisy, exact, levels = figure.subplots(1, 3)
    for name, found in results.items():
        label, _, _, cost, style, color = METHODS[name]
        key = "last" if name == "sgd-average" else "mean"
        shown = {"color": color, "ms": 3, "lw": 1, "label": label}
        gradients = cost * np.array(found["T"])
        noisy.loglog(gradients, found[key][-1], style, **shown)
        exact.loglog(gradients, found["rms"][0], style, **shown)
        ends = [at(found, sigma, plan.steps / 10 / cost, key) for sigma in plan.sigmas[1:]]
        levels.loglog(plan.sigmas[1:], ends, style, **shown)
    for axis, title, label in (
        (noisy, r"output, $\sigma=1$", "gradients"),
        (exact, r"RMS over the iterates, $\sigma=0$", "gradients"),
        (levels, f"output, {plan.steps // 10:,} gradients", r"$\sigma$"),
    ):
        axis.set_title(title, fontsize=9)
        axis.set(xlabel=label, ylabel=r"$|\nabla f|$")
        axis.grid(True, alpha=0.3)
    lines, labels = noisy.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(DOCS / "figures" / "rates.png", dpi=130)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}")
    options.add_argument("--quick", action="store_true")
    given = options.parse_args()
    if unknown := set(given.methods) - set(METHODS):
        options.error(f"unknown methods {', '.join(sorted(unknown))}")
    plan, results = (QUICK, {}) if given.quick else (FULL, load(RESULT))
    for name in given.methods or [name for name in METHODS if name not in results]:
        results[name] = summarise(name, plan)
        print(name, results[name]["seconds"], "s", flush=True)
        if not given.quick:
            save(RESULT, {key: results[key] for key in METHODS if key in results})
    print(table(results, plan))
    if not given.quick:
        draw(results, plan)


if __name__ == "__main__":
    main()
