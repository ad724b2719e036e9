"""What a command shows when it ends: final losses, or for many workloads the scores."""

from __future__ import annotations

import math

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from rich.table import Table

from stormplus.bench import scores, statements
from stormplus.bench.style import ordered

FEW = 3  # workloads: each has a line a method


def table_of(frame: pd.DataFrame) -> Table:
    """Final losses of a few workloads, scores over many: either fits a terminal."""
    many = frame["workload"].nunique() > FEW and frame["default"].any()
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
    table = Table("method", title="final training loss (median over seeds)")
    for name in ("default", "best", "at lr"):
        table.add_column(name, justify="right")
    at_default = _lookup(scores.defaults(frame))
    at_best = _lookup(scores.tuned(frame))
    for workload, part in frame.groupby("workload", sort=True):
        table.add_row(f"[bold]{workload}[/]")
        methods = ordered(part["method"].unique())
        lowest = min(at_best[workload, method][0] for method in methods)
        for method in methods:
            default, _ = at_default.get((workload, method), (math.nan, math.nan))
            best, lr = at_best[workload, method]
            text = f"[bold]{_number(best)}[/]" if best == lowest else _number(best)
            table.add_row(
                f"  {method}", _number(default), text, f"{lr:g}" if math.isfinite(best) else ""
            )
        table.add_section()
    return table


def _lookup(ends: pd.DataFrame) -> dict[tuple[str, str], tuple[float, float]]:
    columns = ("workload", "method", "loss", "lr")
    return {(w, m): (loss, lr) for w, m, loss, lr in ends[list(columns)].itertuples(index=False)}


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "diverged" if math.isinf(value) else f"{value:.4g}"
