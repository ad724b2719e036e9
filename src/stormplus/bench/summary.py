"""What a command shows when it ends: final losses, or for many workloads the scores."""

from __future__ import annotations

import math

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from rich.table import Table

from stormplus.bench import scores, statements
from stormplus.bench.style import ordered

WIDE = 3  # workloads: two columns each, and a terminal has no room for more


def table_of(frame: pd.DataFrame) -> Table:
    """Final losses of a few workloads, scores over many: either fits a terminal."""
    many = frame["workload"].nunique() > WIDE and frame["default"].any()
    return score_table(frame) if many else final_table(frame)


def score_table(frame: pd.DataFrame) -> Table:
    """What each method loses without tuning, and how often it is among the fastest."""
    table = Table(
        title=f"{frame['workload'].nunique()} workloads, the least costly method first",
        caption="`stormplus report` shows each workload",
    )
    found = statements.score_table(frame)
    table.add_column("method")
    for name in found.columns:
        table.add_column(name, justify="right")
    for method, *cells in found.itertuples(name=None):
        table.add_row(method, *cells)
    return table


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
