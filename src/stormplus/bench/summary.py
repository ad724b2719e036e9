"""What a command shows when it ends: a table of final losses."""

from __future__ import annotations

import math

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from rich.table import Table

from stormplus.bench import scores
from stormplus.bench.style import ordered


def final_table(frame: pd.DataFrame) -> Table:
    """Final training losses: each method at its default and, where others were run, at its best."""
    table = Table(title="final training loss (median over seeds)")
    table.add_column("method")
    workloads = sorted(frame["workload"].unique())
    for workload in workloads:
        table.add_column(f"{workload}\ndefault", justify="right")
        table.add_column("\nbest (lr)", justify="right")
    at_default = _lookup(scores.defaults(frame))
    at_best = _lookup(scores.tuned(frame))
    lowest = {w: min(loss for (at, _), (loss, _) in at_best.items() if at == w) for w in workloads}
    for method in ordered(frame["method"].unique()):
        cells = []
        for workload in workloads:
            default, _ = at_default.get((workload, method), (math.nan, math.nan))
            best, lr = at_best.get((workload, method), (math.nan, math.nan))
            cells.append(_number(default))
            text = f"{_number(best)} ({lr:g})" if math.isfinite(best) else _number(best)
            cells.append(f"[bold]{text}[/]" if best == lowest[workload] else text)
        table.add_row(method, *cells)
    return table


def _lookup(ends: pd.DataFrame) -> dict[tuple[str, str], tuple[float, float]]:
    columns = ("workload", "method", "loss", "lr")
    return {(w, m): (loss, lr) for w, m, loss, lr in ends[list(columns)].itertuples(index=False)}


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "diverged" if math.isinf(value) else f"{value:.4g}"
