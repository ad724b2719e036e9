"""Scores of the benchmark: pure functions of the frame that `rows.load` returns.

**Gap at defaults** is the share of the achievable loss reduction that is missed without tuning:

    gap = (loss - best) / (initial - best)

with `best` the lowest final loss of any method at any lr. 0 is as good as the best tuned method,
1 is no better than the initial loss, inf is divergence.
"""

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals
from stormplus_bench.profiles import targets, time_to_target


def gap(frame: pd.DataFrame, ends: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return workload, method, lr, loss, initial, best and gap, of each method at its default.

    `gap` is nan where no run of the workload ends below the initial loss. `ends` replaces the
    defaults by other lines of `finals.per_rate`, such as `finals.tuned`.
    """
    new = (finals.defaults(frame) if ends is None else ends)[["workload", "method", "lr", "loss"]]
    new = new.assign(
        best=new["workload"].map(finals.per_rate(frame).groupby("workload")["loss"].min()),
        initial=new["workload"].map(finals.initial_loss(frame)),
    )
    achievable = new["initial"] - new["best"]
    return new.assign(gap=(new["loss"] - new["best"]) / achievable.where(achievable > 0))


def mean_gap(gaps: pd.DataFrame) -> pd.DataFrame:
    """Return `mean`, `workloads` and `rank` per method, best first.

    In the mean a workload counts for at most 1. Means over different workloads cannot be
    compared, so only methods that ran all workloads have a rank; the others come last.
    """
    groups = gaps["gap"].clip(upper=1.0).groupby(gaps["method"])
    table = pd.DataFrame({"mean": groups.mean(), "workloads": groups.count()})
    total = gaps["workload"][gaps["gap"].notna()].nunique()
    table["part"] = table["workloads"] < total
    table = table.sort_values(["part", "mean"], kind="stable")
    ranked = ~table["part"] & table["mean"].notna()
    table["rank"] = ranked.cumsum().where(ranked)
    return table[["mean", "workloads", "rank"]]


def gap_map(gaps: pd.DataFrame) -> pd.DataFrame:
    """Return the gaps in per cent, methods by workloads and their mean, best first."""
    mean = mean_gap(gaps)["mean"]
    grid = gaps.pivot(index="method", columns="workload", values="gap").reindex(mean.index)
    return 100 * grid.assign(mean=mean)


def results(frame: pd.DataFrame) -> pd.DataFrame:
    """Return all scores, one line per workload and method.

    `tuned_loss` and `tuned_lr` are those at the best of `lrs` learning rates, `time` is the time
    to target, `runs` and `diverged` count the runs at all lr. The rest is at the default lr.
    """
    keys = ["workload", "method"]
    ends = finals.defaults(frame).drop(columns=["seeds", "diverged"])
    times = time_to_target(frame, targets(frame))
    best = finals.tuned(frame).rename(
        columns={"lr": "tuned_lr", "loss": "tuned_loss", "rates": "lrs"}
    )
    counts = finals.per_rate(frame).groupby(keys)[["seeds", "diverged"]].sum()
    gaps = gap(frame)
    gaps["gap"] *= 100
    table = best[[*keys, "tuned_loss", "tuned_lr", "lrs", "at_end"]]
    for part, on in ((ends, keys), (gaps[[*keys, "gap"]], keys), (times, finals.SETTING)):
        table = table.merge(part, on=on, how="left")
    table = table.merge(counts.rename(columns={"seeds": "runs"}).reset_index(), on=keys)
    columns = ["loss", "low", "high", "gap", "lr", "tuned_loss", "tuned_lr", "lrs", "at_end"]
    columns += ["time", "grad_norm", "valid_loss", "valid_accuracy", "seconds", "state_mb"]
    return table[[*keys, *columns, "runs", "diverged"]]
