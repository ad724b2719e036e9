"""The claims of the paper's appendix on its experiment, each judged by the rows.

There is one run of each method, as in the paper, so nothing here has error bars of its own. How
much a run wanders is read off its last measurements; a gap below that is "inconclusive".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

METRICS = ("train_loss", "valid_loss", "train_accuracy", "valid_accuracy")
TRAINING, TEST = ("train_loss", "train_accuracy"), ("valid_accuracy",)
CLOSE = 0.03  # in accuracy; in loss, a tenth of the smaller one
LAST = 3  # measurements that say how much a run wanders


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what was found, and the numbers."""

    text: str
    verdict: str
    numbers: str


class Standings:
    """Every method's metrics at the furthest place of `axis` that all of them have reached.

    Values between two measurements are interpolated: a method of two gradients a step never
    ends at exactly the same place as one of one. A run that diverged has loss +inf and
    accuracy 0, and holds nobody back.
    """

    def __init__(self, frame: pd.DataFrame, axis: str) -> None:
        fine = frame[frame["status"] == "done"]
        reach = fine.groupby("method")[axis].max().min()
        self.values: dict[str, dict[str, float]] = {}
        self.wander: dict[str, dict[str, float]] = {}
        for method, part in frame.groupby("method"):
            if (part["status"] != "done").any():
                self.values[method] = {m: math.inf if "loss" in m else 0.0 for m in METRICS}
                self.wander[method] = dict.fromkeys(METRICS, 0.0)
                continue
            curve = part.sort_values(axis)
            self.values[method] = {
                m: float(np.interp(reach, curve[axis], curve[m])) for m in METRICS
            }
            last = curve[curve[axis] <= reach].iloc[-LAST:]
            self.wander[method] = last[list(METRICS)].std().fillna(0.0).to_dict()

    def gap(self, method: str, other: str, metric: str) -> float:
        """By how much `method` is better."""
        one, two = self.values[method][metric], self.values[other][metric]
        gap = one - two if one != two else 0.0  # two that diverged are level
        return -gap if metric.endswith("loss") else gap

    def best(self, methods: list[str], metric: str) -> str:
        return max(methods, key=lambda m: self.gap(m, methods[0], metric))

    def noise(self, method: str, other: str, metric: str) -> float:
        return self.wander[method][metric] + self.wander[other][metric]

    def limit(self, method: str, other: str, metric: str) -> float:
        """Up to which gap two methods are called close."""
        smaller = min(self.values[method][metric], self.values[other][metric])
        return 0.1 * smaller if metric.endswith("loss") else CLOSE

    def shown(self, metrics: tuple[str, ...], methods: list[str] | None = None) -> str:
        return "; ".join(
            f"{metric.replace('valid', 'test').replace('_', ' ')}: "
            + ", ".join(f"{m} {self.values[m][metric]:.3f}" for m in methods or sorted(self.values))
            for metric in metrics
        )


def claims(frame: pd.DataFrame, axis: str, ours: str = "STORM+") -> list[Claim]:
    """The claims, with `ours` in the place of the paper's STORM+."""
    left_out = {"STORM+", "STORM+ mean"} - {ours}
    ends = Standings(frame[~frame["method"].isin(left_out)], axis)
    storms = ["STORM", ours]
    rivals = ["SGD momentum", "AdaGrad", "Adam"]
    others = [m for m in ends.values if m != "Adam"]
    return [
        Claim(
            "there is no noticeable practical advantage for STORM+",
            _slight(ends, [ours], ["STORM", *rivals], METRICS),
            ends.shown(METRICS),
        ),
        Claim(
            "STORM+ is comparable with the other adaptive methods",
            _close(ends, [(ours, "Adam"), (ours, "AdaGrad")], METRICS),
            ends.shown(METRICS, [ours, "Adam", "AdaGrad"]),
        ),
        Claim(
            "STORM and STORM+ are quite close under all four metrics",
            _close(ends, [("STORM", ours)], METRICS),
            ends.shown(METRICS, storms),
        ),
        Claim(
            "in training, STORM and STORM+ outperform the others by a small margin",
            _both(_better(ends, storms, rivals, TRAINING), _slight(ends, storms, rivals, TRAINING)),
            ends.shown(TRAINING),
        ),
        Claim(
            "Adam and SGD have the smaller training accuracy and the larger training loss",
            _better(ends, ["AdaGrad", *storms], ["Adam", "SGD momentum"], TRAINING),
            ends.shown(TRAINING),
        ),
        Claim(
            "Adam generalises slightly better than the others",
            _both(_better(ends, ["Adam"], others, TEST), _slight(ends, ["Adam"], others, TEST)),
            ends.shown(TEST),
        ),
        Claim(
            "in test accuracy Adam is followed by STORM and STORM+",
            _both(
                _better(ends, ["Adam"], storms, TEST),
                _better(ends, storms, ["SGD momentum", "AdaGrad"], TEST),
            ),
            ends.shown(TEST),
        ),
    ]


def _both(*verdicts: str) -> str:
    if "not seen" in verdicts:
        return "not seen"
    return "seen" if set(verdicts) == {"seen"} else "inconclusive"


def _better(
    ends: Standings, methods: list[str], others: list[str], metrics: tuple[str, ...]
) -> str:
    """Every method better than every other one, in every metric, by more than they wander."""
    found = [
        (ends.gap(m, o, metric), ends.noise(m, o, metric))
        for m, o, metric in product(methods, others, metrics)
    ]
    if any(gap < -noise for gap, noise in found):
        return "not seen"
    return "seen" if all(gap > noise for gap, noise in found) else "inconclusive"


def _slight(
    ends: Standings, methods: list[str], others: list[str], metrics: tuple[str, ...]
) -> str:
    """No method far ahead of the best other one, in any metric."""
    cases = [(m, ends.best(others, metric), metric) for m, metric in product(methods, metrics)]
    return _within(ends, cases, ahead_only=True)


def _close(ends: Standings, pairs: list[tuple[str, str]], metrics: tuple[str, ...]) -> str:
    """Every pair close in every metric."""
    return _within(ends, [(*pair, metric) for pair, metric in product(pairs, metrics)])


def _within(ends: Standings, cases: list[tuple[str, str, str]], *, ahead_only: bool = False) -> str:
    """Every gap within the limit of what is close, by more than the runs wander."""
    found = []
    for case in cases:
        gap = ends.gap(*case)
        found.append((gap if ahead_only else abs(gap), ends.noise(*case), ends.limit(*case)))
    if any(not gap - noise <= limit for gap, noise, limit in found):
        return "not seen"
    return "seen" if all(gap + noise <= limit for gap, noise, limit in found) else "inconclusive"
