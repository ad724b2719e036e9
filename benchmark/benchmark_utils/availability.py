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
    set_budget(workload, budget)
    return {"workload": workload, "reason": None}


def set_budget(workload: Any, budget: int | None) -> None:
    """Another budget is another workload, with a name of its own."""
    if budget and budget != workload.budget:
        workload.budget = budget
        workload.name = f"{workload.name} ({budget} evaluations)"
