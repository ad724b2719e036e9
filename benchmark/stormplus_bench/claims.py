"""The claims of the paper's appendix on its experiment, each judged by the rows.

A method's value is the mean over its seeds. With two seeds or more it is known up to half the
spread between them; the paper has one run of each method and no error bars, and so have some rows
here: then it is known up to what the run wanders over its last measurements. A test accuracy is
known no better than the number of test images allows. A gap below what is known is "inconclusive".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

NAMES = {
    "train_loss": "training loss",
    "valid_loss": "test loss",
    "train_accuracy": "training accuracy",
    "valid_accuracy": "test accuracy",
}
METRICS = tuple(NAMES)
TRAINING, TEST = ("train_loss", "train_accuracy"), ("valid_accuracy",)
RIVALS = ("SGD momentum", "AdaGrad", "Adam")
AXES = {"epoch": "epochs", "evaluations": "gradient evaluations"}
CLOSE = 0.03  # in accuracy and in loss; or a tenth of the smaller loss, if that is more
LAST = 3  # measurements that say how much a run wanders
TEST_IMAGES = 10_000
ADAPTIVE = ("AdaGrad", "Adam")
NOT_RUN = "not run yet"
CLAIMS = (
    "there is no noticeable practical advantage for STORM+",
    "STORM+ is comparable with the other adaptive methods",
    "STORM and STORM+ are quite close under all four metrics",
    "in training, STORM and STORM+ outperform the others by a small margin",
    "Adam and SGD have the smaller training accuracy and the larger training loss",
    "Adam generalises slightly better than the others",
    "in test accuracy Adam is followed by STORM and STORM+",
)


@dataclass(frozen=True)
class Reading:
    """Which rows stand for the paper's STORM+ and STORM, and where they are compared."""

    ours: str
    storm: str
    axis: str

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.ours, self.storm, *RIVALS)

    @property
    def title(self) -> str:
        return f"{self.storm}, {self.ours}; equal {AXES[self.axis]}"


class Standings:
    """Every method's metrics at the furthest place of `axis` that all of them have reached.

    Values between two measurements are interpolated: a method of two gradients a step never
    ends at exactly the same place as one of one. A method of which a run diverged has loss +inf
    and accuracy 0, and holds nobody back.

    Attributes:
        reach: The place.
        values: By method and metric, the mean over seeds.
        unsure: By method and metric, up to what the value is known.
        seeds: By method, how many.
    """

    def __init__(self, frame: pd.DataFrame, axis: str) -> None:
        fine = frame[frame["status"] == "done"]
        self.reach = float(fine.groupby(["method", "seed"])[axis].max().min())
        self.values: dict[str, dict[str, float]] = {}
        self.unsure: dict[str, dict[str, float]] = {}
        self.seeds: dict[str, int] = {}
        for method, part in frame.groupby("method"):
            self.seeds[method] = part["seed"].nunique()
            if (part["status"] != "done").any():
                self.values[method] = {m: math.inf if "loss" in m else 0.0 for m in METRICS}
                self.unsure[method] = dict.fromkeys(METRICS, 0.0)
                continue
            runs = [run.sort_values(axis) for _, run in part.groupby("seed")]
            ends = pd.DataFrame(
                {m: [np.interp(self.reach, run[axis], run[m]) for run in runs] for m in METRICS}
            )
            self.values[method] = ends.mean().to_dict()
            self.unsure[method] = ((ends.max() - ends.min()) / 2).to_dict()
            if len(runs) == 1:
                last = runs[0][runs[0][axis] <= self.reach].iloc[-LAST:]
                self.unsure[method] = last[list(METRICS)].std().fillna(0.0).to_dict()
            rate = self.values[method]["valid_accuracy"]
            drawn = math.sqrt(rate * (1 - rate) / TEST_IMAGES)  # of other images, another rate
            unsure = self.unsure[method]
            unsure["valid_accuracy"] = max(unsure["valid_accuracy"], drawn)

    def gap(self, method: str, other: str, metric: str) -> float:
        """By how much `method` is better."""
        one, two = self.values[method][metric], self.values[other][metric]
        gap = one - two if one != two else 0.0  # two that diverged are level
        return -gap if metric.endswith("loss") else gap

    def best(self, methods: Sequence[str], metric: str) -> str:
        return max(methods, key=lambda m: self.gap(m, methods[0], metric))

    def worst(self, methods: Sequence[str], metric: str) -> str:
        return min(methods, key=lambda m: self.gap(m, methods[0], metric))

    def noise(self, method: str, other: str, metric: str) -> float:
        """A gap of no more is none: between seeds, the two ranges touch."""
        return self.unsure[method][metric] + self.unsure[other][metric]

    def told(self, method: str, other: str, metric: str) -> str:
        """Two values side by side, in words."""
        one, two = (f"{m} {self.values[m][metric]:.2g}" for m in (method, other))
        return f"{NAMES[metric]}: {one}, {two}"

    def told_unsure(self, method: str, other: str, metric: str) -> str:
        """The same, with how well the gap between them is known."""
        return f"{self.told(method, other, metric)}, ± {self.noise(method, other, metric):.1g}"

    def limit(self, method: str, other: str, metric: str) -> float:
        """Up to which gap two methods are called close."""
        smaller = min(self.values[method][metric], self.values[other][metric])
        return max(CLOSE, 0.1 * smaller) if metric.endswith("loss") else CLOSE


class Verdict(str):
    """A finding in a word, "seen", "not seen" or "inconclusive".

    Attributes:
        why: Of what is not seen, the gap that says so the loudest; of what is inconclusive, the one
            that is least clear.
    """

    __slots__ = ("why",)
    why: str

    def __new__(cls, word: str, why: str = "") -> Verdict:
        self = super().__new__(cls, word)
        self.why = why
        return self


def verdicts(frame: pd.DataFrame, reading: Reading) -> dict[str, Verdict]:
    """What the rows say of each claim.

    Where a method that a reading needs is not there: `NOT_RUN`.
    """
    frame = frame[frame["method"].isin(reading.methods)]
    if not set(reading.methods) <= set(frame["method"]):
        return dict.fromkeys(CLAIMS, Verdict(NOT_RUN))
    ends = Standings(frame, reading.axis)
    ours, rivals = [reading.ours], list(RIVALS)
    storms = [reading.storm, reading.ours]
    others = [m for m in reading.methods if m != "Adam"]
    found = (
        _slight(ends, ours, [reading.storm, *rivals], METRICS),
        _comparable(ends, reading.ours, ADAPTIVE, METRICS),
        _close(ends, [(reading.storm, reading.ours)], METRICS),
        _both(_better(ends, storms, rivals, TRAINING), _slight(ends, storms, rivals, TRAINING)),
        _better(ends, ["AdaGrad", *storms], ["Adam", "SGD momentum"], TRAINING),
        _both(_better(ends, ["Adam"], others, TEST), _slight(ends, ["Adam"], others, TEST)),
        _both(
            _better(ends, ["Adam"], storms, TEST),
            _better(ends, storms, ["SGD momentum", "AdaGrad"], TEST),
        ),
    )
    return dict(zip(CLAIMS, found, strict=True))


def _both(*verdicts: Verdict) -> Verdict:
    for word in ("not seen", "inconclusive"):
        for verdict in verdicts:
            if verdict == word:
                return verdict
    return Verdict("seen")


def _better(
    ends: Standings, methods: list[str], others: list[str], metrics: tuple[str, ...]
) -> Verdict:
    """Every method better than every other one, in every metric, by more than is unsure."""
    cases = list(product(methods, others, metrics))
    found = [(ends.gap(*case), ends.noise(*case)) for case in cases]
    # How far behind, in units of what is close; two that diverged are level.
    behind = [-(gap + noise) / ends.limit(*case) for case, (gap, noise) in zip(cases, found)]
    if max(behind) > 0:
        return Verdict("not seen", ends.told(*cases[int(np.argmax(behind))]))
    ahead = [(gap - noise) / ends.limit(*case) for case, (gap, noise) in zip(cases, found)]
    if min(ahead) > 0:
        return Verdict("seen")
    return Verdict("inconclusive", ends.told_unsure(*cases[int(np.argmin(ahead))]))


def _slight(
    ends: Standings, methods: list[str], others: list[str], metrics: tuple[str, ...]
) -> Verdict:
    """No method far ahead of the best other one, in any metric."""
    cases = [(m, ends.best(others, metric), metric) for m, metric in product(methods, metrics)]
    return _within(ends, cases, ahead_only=True)


def _comparable(
    ends: Standings, method: str, others: Sequence[str], metrics: tuple[str, ...]
) -> Verdict:
    """Between the best and the worst of the others in every metric, or close to one of them."""
    behind = [(ends.worst(others, metric), method, metric) for metric in metrics]
    return _both(
        _slight(ends, [method], list(others), metrics), _within(ends, behind, ahead_only=True)
    )


def _close(ends: Standings, pairs: list[tuple[str, str]], metrics: tuple[str, ...]) -> Verdict:
    """Every pair close in every metric."""
    return _within(ends, [(*pair, metric) for pair, metric in product(pairs, metrics)])


def _within(
    ends: Standings, cases: list[tuple[str, str, str]], *, ahead_only: bool = False
) -> Verdict:
    """Every gap within the limit of what is close, by more than is unsure."""
    found = []
    for case in cases:
        gap = ends.gap(*case)
        found.append((gap if ahead_only else abs(gap), ends.noise(*case), ends.limit(*case)))
    apart = [(gap - noise) / limit for gap, noise, limit in found]
    if max(apart) > 1:
        return Verdict("not seen", ends.told(*cases[int(np.argmax(apart))]))
    at_most = [(gap + noise) / limit for gap, noise, limit in found]
    if max(at_most) <= 1:
        return Verdict("seen")
    return Verdict("inconclusive", ends.told_unsure(*cases[int(np.argmax(at_most))]))
