"""What the paper's appendix says of its experiment, each sentence checked against the rows.

One run of each method, as in the paper, so nothing here has error bars of its own. How much
a run wanders is read off its last measurements; a gap below that is "inconclusive".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus.bench.paper_plan import BATCH, TWO_GRADIENTS

METRICS = ("train_loss", "valid_loss", "train_accuracy", "valid_accuracy")
OTHERS = ("SGD momentum", "AdaGrad", "Adam")
CLOSE = {"train_loss": 0.1, "valid_loss": 0.1, "train_accuracy": 0.03, "valid_accuracy": 0.03}
LAST = 3  # measurements that say how much a run wanders


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what was found, and the numbers."""

    text: str
    verdict: str
    numbers: str


class Finals:
    """The metrics of every method at one place of the x axis, and how much they wander."""

    def __init__(self, frame: pd.DataFrame, axis: str) -> None:
        parts = {method: part.sort_values(axis) for method, part in frame.groupby("method")}
        reach = min(part[axis].max() for part in parts.values())
        parts = {method: part[part[axis] <= reach] for method, part in parts.items()}
        self.values = {method: part.iloc[-1] for method, part in parts.items()}
        self.wander = {
            method: part.iloc[-LAST:][list(METRICS)].std().fillna(0)
            for method, part in parts.items()
        }

    def get(self, method: str, metric: str) -> float:
        return float(self.values[method][metric])

    def compare(self, method: str, other: str, metric: str) -> str:
        """Whether `method` is "better", "worse" or, within the wander, "unclear"."""
        gap = self.get(method, metric) - self.get(other, metric)
        gap = -gap if metric.endswith("loss") else gap
        noise = float(self.wander[method][metric] + self.wander[other][metric])
        return "unclear" if abs(gap) <= noise else "better" if gap > 0 else "worse"

    def shown(self, metric: str) -> str:
        return ", ".join(f"{m} {self.get(m, metric):.3f}" for m in sorted(self.values))


def with_epochs(frame: pd.DataFrame, images: int) -> pd.DataFrame:
    """Add the column `epoch`: passes over the data, as in the paper's pictures."""
    return frame.assign(epoch=frame["samples"] * BATCH / images)


def claims(frame: pd.DataFrame, axis: str) -> list[Claim]:
    """The claims, read at the furthest place of `axis` that every method has reached."""
    ends = Finals(frame, axis)
    storms = [m for m in TWO_GRADIENTS if m in ends.values]
    rivals = [m for m in OTHERS if m in ends.values]
    return [
        Claim(
            "STORM and STORM+ are quite close under all four metrics",
            _close(ends, storms),
            "; ".join(f"{name}: {_some(ends, storms, name)}" for name in METRICS),
        ),
        Claim(
            "in training, STORM and STORM+ outperform the others by a small margin",
            _all(ends, storms, rivals, ("train_loss", "train_accuracy")),
            f"training loss: {ends.shown('train_loss')}",
        ),
        Claim(
            "Adam and SGD have the smaller training accuracy and the larger training loss",
            _all(ends, ["AdaGrad", *storms], ["Adam", "SGD momentum"], ("train_loss",)),
            f"training loss: {ends.shown('train_loss')}",
        ),
        Claim(
            "Adam generalises slightly better than the others",
            _all(ends, ["Adam"], [m for m in ends.values if m != "Adam"], ("valid_accuracy",)),
            f"test accuracy: {ends.shown('valid_accuracy')}",
        ),
        Claim(
            "STORM+ shows no noticeable advantage but is comparable with the adaptive methods",
            _comparable(ends),
            f"test accuracy: {ends.shown('valid_accuracy')}",
        ),
    ]


def _some(ends: Finals, methods: list[str], metric: str) -> str:
    return ", ".join(f"{m} {ends.get(m, metric):.3f}" for m in methods)


def _close(ends: Finals, methods: list[str]) -> str:
    def near(metric: str) -> bool:
        values = [ends.get(m, metric) for m in methods]
        scale = min(values) if metric.endswith("loss") else 1.0
        return max(values) - min(values) <= CLOSE[metric] * scale

    return "seen" if all(near(metric) for metric in METRICS) else "not seen"


def _all(ends: Finals, methods: list[str], others: list[str], metrics: tuple[str, ...]) -> str:
    """Every method better than every other one, in every metric."""
    found = {ends.compare(m, o, metric) for m in methods for o in others for metric in metrics}
    if "worse" in found:
        return "not seen"
    return "inconclusive" if "unclear" in found else "seen"


def _comparable(ends: Finals) -> str:
    near: Callable[[str], bool] = lambda metric: any(  # noqa: E731
        abs(ends.get("STORM+", metric) - ends.get(m, metric)) <= CLOSE[metric]
        for m in ("Adam", "AdaGrad")
    )
    return "seen" if near("valid_accuracy") and near("train_accuracy") else "not seen"
