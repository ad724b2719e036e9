"""What a run is: its fields, how they are checked, and its lines in the flat frame."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

Key = tuple[str, str, float, int]
KEY = ("workload", "method", "lr", "seed")
CURVE = (
    "evaluations",
    "samples",
    "seconds",
    "train_loss",
    "valid_loss",
    "train_accuracy",
    "valid_accuracy",
    "grad_norm",
)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "workload": str,
    "method": str,
    "lr": (int, float),
    "default": bool,
    "seed": int,
    "status": str,
    "budget": (int, float),
    "batch_size": int,
    "curve": dict,
}
STATUSES = ("done", "diverged")
COLUMNS = (
    *("workload", "method", "lr", "default", "seed", "status", "budget", "batch_size"),
    *CURVE,
    *("peak_memory_mb", "state_mb", "measured", "versions", "machine"),
)
OPTIONAL = ("peak_memory_mb", "state_mb", "measured", "versions", "machine")


def check(run: Any, where: str) -> None:
    """Raise a ValueError that says what is wrong with a run, and where it is."""
    if not isinstance(run, dict):
        raise ValueError(f"{where} should be a run (a JSON object), got {str(run)[:60]!r}")
    for name, kind in _TYPES.items():
        value = run.get(name)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"{where}: {name!r} should be {_name(kind)}, got {value!r}")
    if run["status"] not in STATUSES:
        raise ValueError(f"{where}: 'status' should be one of {STATUSES}, got {run['status']!r}")
    if not math.isfinite(run["lr"]):
        raise ValueError(f"{where}: 'lr' should be finite, got {run['lr']!r}")
    measured = run.get("measured")  # on how many examples the losses are measured, if told
    if measured is not None and (type(measured) is not int or measured < 1):
        raise ValueError(f"{where}: 'measured' should be a positive int, got {measured!r}")
    for name in CURVE:
        values = run["curve"].get(name)
        if not isinstance(values, list) or not all(map(_number_or_none, values)):
            raise ValueError(f"{where}: curve's {name!r} should be a list of numbers and nulls")
    lengths = {name: len(run["curve"][name]) for name in CURVE}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: the parts of 'curve' should have one length, got {lengths}")


def _number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def finite(value: Any) -> Any:
    """The value with None for every number that is not finite: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def key_of(run: dict[str, Any]) -> Key:
    return run["workload"], run["method"], float(run["lr"]), run["seed"]


def lines_of(run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The run's lines in the flat frame, one for each point of its curve, one if it has none."""
    same = {name: run.get(name) for name in COLUMNS if name not in CURVE}
    same["versions"] = json.dumps(run.get("versions") or {}, sort_keys=True)
    same["machine"] = str(run.get("machine") or "")
    points = list(zip(*(run["curve"][name] for name in CURVE)))
    for point in points or [(0, *[None] * (len(CURVE) - 1))]:
        yield same | dict(zip(CURVE, point))


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    texts = ("workload", "method", "status", "versions", "machine")
    kinds = dict.fromkeys(COLUMNS, "float64") | dict.fromkeys(texts, "str")
    kinds |= {"default": "bool", "seed": "int64", "batch_size": "int64"}
    return frame.astype(kinds)
