"""The rate experiment's table, JSON and figure: pure functions of its results."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from stormplus.theory.rates.experiment import Plan, Result, versions
from stormplus.theory.rates.fit import Slope, slope
from stormplus.theory.rates.store import write_whole

__all__ = ["details", "raw_rows", "slopes", "summary", "table", "versions", "write"]

# Okabe & Ito's colours, told apart with every kind of colour vision; markers help too.
STYLE = {
    "storm+": ("STORM+", "#D55E00", "o"),
    "simplified-storm+": ("simplified STORM+", "#E69F00", "s"),
    "storm": ("STORM (L, G known, b tuned)", "#009E73", "^"),
    "sgd": (r"SGD, $1/\sqrt{t}$ (tuned)", "#0072B2", "v"),
    "adagrad-norm": ("AdaGrad-norm", "#CC79A7", "D"),
}
# The exponents of T that theory proves for E|grad f(x_bar_T)|: (with noise, without).
THEORY: dict[str, tuple[float, float]] = {
    "storm+": (-1 / 3, -1 / 2),
    "simplified-storm+": (-1 / 3, -1 / 3),
    "storm": (-1 / 3, -1 / 2),
    "sgd": (-1 / 4, -1 / 4),
    "adagrad-norm": (-1 / 4, -1 / 2),
}


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
        label = STYLE[name][0].replace("$1/\\sqrt{t}$", "1/sqrt(t)")
        lines.append(f"| {label} | {' | '.join([*cells[:2], noisy, *cells[2:], exact])} |")
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


def raw_rows(results: Mapping[str, Result], plan: Plan) -> list[dict[str, Any]]:
    """One flat row a method, sigma and seed; `mean` and `square` are over the checkpoints."""
    return [
        {
            "method": name,
            "sigma": sigma,
            "seed": seed,
            "T": plan.checkpoints.tolist(),
            "mean": result.mean[:, j, k].tolist(),
            "square": result.square[:, j, k].tolist(),
        }
        for name, result in results.items()
        for j, sigma in enumerate(plan.sigmas)
        for k, seed in enumerate(plan.seeds)
    ]


def write(results: dict[str, Result], plan: Plan, folder: Path) -> list[Path]:
    """Write `rates.json` (raw rows), `rates_summary.json`, `rates.md` and `rates.png`."""
    files = [folder / f"rates{end}" for end in (".json", "_summary.json", ".md", ".png")]
    write_whole(files[0], json.dumps(raw_rows(results, plan)).encode() + b"\n")
    write_whole(files[1], json.dumps(summary(results, plan), indent=1).encode() + b"\n")
    write_whole(files[2], table(results, plan).encode() + b"\n")
    from stormplus.theory.rates.figure import draw

    picture = io.BytesIO()
    draw(results, plan).savefig(picture, format="png", dpi=110)
    write_whole(files[3], picture.getvalue())
    return files
