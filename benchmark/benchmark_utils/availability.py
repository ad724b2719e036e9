"""A workload whose data is not there is skipped with the reason, not an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stormplus.bench.data import MissingData


def or_reason(make: Callable[[], Any], budget: int | None = None) -> dict[str, Any]:
    try:
        workload = make()
    except MissingData as missing:
        return {"workload": None, "reason": str(missing)}
    workload.budget = budget or workload.budget
    return {"workload": workload, "reason": None}
