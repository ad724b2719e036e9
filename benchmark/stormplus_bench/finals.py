"""Finals: the last measured values of runs, which every score is computed from.

A run's final loss is the training loss at its last measurement, +inf if the run diverged or this
loss is not finite. Over seeds the median is taken, so that a method that diverges in half of
its runs or more has the final loss +inf. `low` and `high` are the smallest and the largest
over seeds: with three to five seeds any narrower band would pretend to know a distribution.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench.rows import KEY

SETTING = ["workload", "method", "lr"]
QUALITY = ["valid_loss", "train_accuracy", "valid_accuracy"]
ONE_LR = "methods with one learning rate are left out"
Table = TypeVar("Table", pd.DataFrame, pd.Series)


def once(compute: Callable[..., Table]) -> Callable[..., Table]:
    """Compute a table once for each frame: scores and figures ask for the same ones many times.

    It is kept for as long as the frame lives. Nobody changes a frame of rows in place; what is
    handed out is a copy, which pandas makes when somebody writes to it.
    """
    known: dict[tuple[Any, ...], Table] = {}

    @wraps(compute)
    def table(frame: pd.DataFrame, *rest: Any, **named: Any) -> Table:
        key = (id(frame), *rest, *named.items())
        if key not in known:
            known[key] = compute(frame, *rest, **named)
            weakref.finalize(frame, known.pop, key, None).atexit = False
        return known[key].copy(deep=False)

    return table


@once
def per_run(frame: pd.DataFrame) -> pd.DataFrame:
    """One line for each run: its last values, `loss` and `initial` (the first loss).

    A run that diverged has no last values: what was measured before tells nothing of its end.
    """
    ordered = frame.sort_values("evaluations", kind="stable")
    groups = ordered.groupby(list(KEY), sort=False)
    table = groups.last()  # the last value that is known, column by column
    at_end = groups.tail(1).set_index(list(KEY))["train_loss"].reindex(table.index)
    fine = (table["status"] == "done") & np.isfinite(at_end)
    table["loss"] = at_end.where(fine, np.inf)
    table["grad_norm"] = table["grad_norm"].where(fine, np.inf)
    table[QUALITY] = table[QUALITY].where(fine)
    table["initial"] = groups.head(1).set_index(list(KEY))["train_loss"].reindex(table.index)
    return table.reset_index()


def ends_only(frame: pd.DataFrame) -> pd.DataFrame:
    """The first and the last measurement of each run: enough for every score of final losses."""
    groups = frame.sort_values("evaluations", kind="stable").groupby(list(KEY), sort=False)
    return pd.concat([groups.head(1), groups.tail(1)])


@once
def per_rate(frame: pd.DataFrame) -> pd.DataFrame:
    """One line for each workload, method and lr: medians over seeds, and the spread.

    Columns: `loss`, `low`, `high`, `seeds`, `diverged` (a number of runs), `default`,
    `grad_norm`, `grad_low`, `grad_high`, and medians of what else was measured. Validation loss
    and accuracies are nan if `loss` is inf, else medians of the runs that did not diverge.
    """
    runs = per_run(frame)
    groups = runs.assign(bad=np.isinf(runs["loss"])).groupby(SETTING, sort=True)
    medians = [*QUALITY, "seconds", "peak_memory_mb", "state_mb"]
    medians += ["budget", "batch_size", "evaluations"]
    table = groups.agg(
        default=("default", "any"),
        loss=("loss", "median"),
        low=("loss", "min"),
        high=("loss", "max"),
        seeds=("seed", "nunique"),
        diverged=("bad", "sum"),
        grad_norm=("grad_norm", "median"),
        grad_low=("grad_norm", "min"),
        grad_high=("grad_norm", "max"),
        **{name: (name, "median") for name in medians},
    ).reset_index()
    table[QUALITY] = table[QUALITY].where(np.isfinite(table["loss"]))
    return table


def defaults(frame: pd.DataFrame) -> pd.DataFrame:
    """`per_rate` at each method's own documented learning rate: one line per workload and method.

    Raises:
        ValueError: A method has two such learning rates on one workload.
    """
    table = per_rate(frame)
    table = table[table["default"]]
    twice = table[table.duplicated(["workload", "method"])]
    if len(twice):
        workload, method = twice.iloc[0][["workload", "method"]]
        rates = table[(table["workload"] == workload) & (table["method"] == method)]["lr"]
        raise ValueError(
            f"{method} has {len(rates)} default learning rates on {workload}: "
            f"{', '.join(f'{lr:g}' for lr in rates)}; mark one of them, or report files of one "
            "benchmark only"
        )
    return table.reset_index(drop=True)


def tuned(frame: pd.DataFrame) -> pd.DataFrame:
    """`per_rate` at the lr with the lowest final loss: one line per workload and method.

    The lr is chosen on the seeds that are reported, which flatters every method alike. Equal
    losses: the default, else the smaller lr.

    `rates` is the number of lr that were run, `at_end` whether the best of several is the lowest
    or the highest of them, so that a wider range might do better. It is false if all diverged.
    """
    table = per_rate(frame)
    rates = table.groupby(["workload", "method"])["lr"]
    ends = (table["lr"] == rates.transform("min")) | (table["lr"] == rates.transform("max"))
    table["rates"] = rates.transform("size")
    table["at_end"] = ends & (table["rates"] > 1) & np.isfinite(table["loss"])
    table = table.sort_values(
        ["workload", "method", "loss", "default", "lr"], ascending=[True, True, True, False, True]
    )
    return table.groupby(["workload", "method"], sort=True).head(1).reset_index(drop=True)


@once
def at(frame: pd.DataFrame, *, best_lr: bool) -> pd.DataFrame:
    """`defaults(frame)`, or `tuned(frame)` without methods that ran one lr on a workload there.

    Such a method was not tuned, and a comparison of tuned methods must not call it so.
    """
    if not best_lr:
        return defaults(frame)
    table = tuned(frame)
    return table[table["rates"] > 1].reset_index(drop=True)


def any_left_out(frame: pd.DataFrame) -> bool:
    """Whether `at(frame, best_lr=True)` leaves out anything."""
    return bool((frame.groupby(["workload", "method"])["lr"].nunique() == 1).any())


def check_budgets(frame: pd.DataFrame) -> None:
    """Raise a ValueError if runs of one workload had different budgets."""
    for workload, budgets in frame.groupby("workload")["budget"]:
        found = sorted(budgets.unique())
        if len(found) > 1:
            raise ValueError(
                f"the runs of {workload} have budgets of {', '.join(f'{b:,g}' for b in found)} "
                "gradient evaluations, and cannot be compared: report files of one budget only"
            )


def best_tuned(frame: pd.DataFrame) -> pd.DataFrame:
    """For each workload the best of all methods, each at its best lr."""
    table = tuned(frame).sort_values(["workload", "loss"], kind="stable")
    return table.groupby("workload", sort=True).head(1).reset_index(drop=True)


def initial_loss(frame: pd.DataFrame) -> pd.Series:
    """For each workload the loss before training: the median of the runs' first losses."""
    return per_run(frame).groupby("workload")["initial"].median()
