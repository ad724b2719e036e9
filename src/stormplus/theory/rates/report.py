"""What the rate experiment found: slopes on log-log scales, a table, a summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stormplus.theory.problems.base import Array
from stormplus.theory.rates.experiment import Plan, Result, versions

# A method's name in the palette, and what it was told besides.
NAMES = {
    "storm+": ("STORM+", ""),
    "simplified-storm+": ("simplified STORM+", ""),
    "storm": ("STORM", "L, G known, b tuned"),
    "sgd": ("SGD", "1/sqrt(t), tuned"),
    "adagrad-norm": ("AdaGrad-norm", ""),
}
# The exponents of T that theory proves for E|grad f(x_bar_T)|: (with noise, without).
THEORY: dict[str, tuple[float, float]] = {
    "storm+": (-1 / 3, -1 / 2),
    "simplified-storm+": (-1 / 3, -1 / 3),
    "storm": (-1 / 3, -1 / 2),
    "sgd": (-1 / 4, -1 / 4),
    "adagrad-norm": (-1 / 4, -1 / 2),
}


def label(method: str) -> str:
    """A method as tables and legends call it."""
    name, note = NAMES[method]
    return f"{name} ({note})" if note else name


class Slope(NamedTuple):
    """A slope and its 95 % interval over seeds."""

    value: float
    low: float
    high: float


def slope(
    T: NDArray[np.int64],
    runs: Array,
    window: tuple[int, int],
    *,
    root: bool = False,
    resamples: int = 1000,
    seed: int = 0,
) -> Slope:
    """The slope of log(mean over seeds) against log T, by least squares over a window.

    The interval is the percentile bootstrap over seeds: runs are resampled whole, because
    the points of one curve are not independent.

    Args:
        T: The checkpoints.
        runs: Over (checkpoint, seed).
        window: First and last T used.
        root: Take the root of the mean: `runs` are squares, and the slope is of the RMS.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    inside = (window[0] <= T) & (window[1] >= T)
    log_t = np.log(T[inside])
    log_t -= log_t.mean()
    weights = log_t / (log_t @ log_t)
    chosen = runs[inside]
    count = chosen.shape[1]
    picks = np.random.default_rng(seed).integers(count, size=(resamples, count))
    # Row 0 is the sample itself.
    curves = np.vstack([chosen.mean(1), chosen[:, picks].mean(2).T])
    slopes = np.log(curves) @ weights * (0.5 if root else 1.0)
    low, high = np.quantile(slopes[1:], [0.025, 0.975])
    return Slope(float(slopes[0]), float(low), float(high))


def slopes(results: Mapping[str, Result], plan: Plan) -> dict[str, dict[str, Slope]]:
    """Four slopes a method: of the mean and of the RMS, with noise and without."""
    T, found = plan.checkpoints, {}
    for name, result in results.items():
        found[name] = {
            f"{what}, {noise}": slope(T, runs[:, column], plan.window, root=what == "rms")
            for noise, column in (("noise", -1), ("no noise", 0))
            for what, runs in (("mean", result.mean), ("rms", result.square))
        }
    return found


def details(results: Mapping[str, Result], plan: Plan) -> dict[str, dict[str, list[float]]]:
    """What the fitted slopes hide, of each method's mean over x_1..x_T.

    The slope at each sigma over the window, the slope over the last decade with its
    interval at the largest sigma, and the local exponents of sigma at the largest T.
    """
    T, found = plan.checkpoints, {}
    log_sigma = np.log(plan.sigmas[1:])
    for name, result in results.items():
        last = slope(T, result.mean[:, -1], (plan.steps // 10, plan.steps))
        at_end = np.log(result.mean[-1, 1:].mean(-1))
        found[name] = {
            "slope at each sigma": [
                round(slope(T, result.mean[:, j], plan.window).value, 3)
                for j in range(len(plan.sigmas))
            ],
            "slope, last decade": [round(value, 3) for value in last],
            "exponents of sigma": (np.diff(at_end) / np.diff(log_sigma)).round(3).tolist(),
        }
    return found


def table(results: Mapping[str, Result], plan: Plan) -> str:
    """The slopes beside the theory's, in Markdown."""
    columns = ("mean, noise", "rms, noise", "mean, no noise", "rms, no noise")
    sigma = f"sigma = {plan.sigmas[-1]:g}"
    lines = [
        f"| method | mean, {sigma} | RMS, {sigma} | theory | mean, sigma = 0 | RMS, sigma = 0 "
        "| theory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in slopes(results, plan).items():
        cells = [f"{found[c].value:.3f} [{found[c].low:.3f}, {found[c].high:.3f}]" for c in columns]
        noisy, exact = (f"{value:.3f}" for value in THEORY[name])
        lines.append(f"| {label(name)} | {' | '.join([*cells[:2], noisy, *cells[2:], exact])} |")
    return "\n".join(lines)


def summary(results: Mapping[str, Result], plan: Plan) -> dict[str, Any]:
    """Slopes, means over seeds and tuning: what the documentation quotes."""
    rows = [
        {
            "method": name,
            "sigma": sigma,
            "T": int(T),
            "mean": float(f"{result.mean[i, j].mean():.4g}"),
            "rms": float(f"{result.square[i, j].mean() ** 0.5:.4g}"),
        }
        for name, result in results.items()
        for j, sigma in enumerate(plan.sigmas)
        for i, T in enumerate(plan.checkpoints)
    ]
    return {
        "plan": asdict(plan),
        # Those of the runs, not of whoever draws them; two, if an upgrade came in between.
        "versions": {
            key: ", ".join(sorted({result.versions.get(key, "?") for result in results.values()}))
            for key in versions()
        },
        "seconds": {name: round(result.seconds, 1) for name, result in results.items()},
        "tuning": {name: result.tuning for name, result in results.items() if result.tuning},
        "slopes": {
            name: {key: list(value) for key, value in found.items()}
            for name, found in slopes(results, plan).items()
        },
        "details": details(results, plan),
        "rows": rows,
    }
