"""Final values of runs, which every score is computed from.

A run's final loss is the training loss at its last measurement, +inf if the run diverged or this
loss is not finite. Over seeds the median is taken, so a method that diverges in half of its
runs or more has the final loss +inf. `low` and `high` are the extremes over seeds.
"""

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench.rows import KEY

SETTING = ["workload", "method", "lr"]
QUALITY = ["valid_loss", "train_accuracy", "valid_accuracy"]


def per_run(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one line per run: its last values, `loss`, and `initial` (the first loss).

    A run that diverged has no validation loss and no accuracy.
    """
    ordered = frame.sort_values("evaluations", kind="stable")
    groups = ordered.groupby(KEY, sort=False)
    table = groups.last()  # per column, the last value that is not missing
    at_end = groups.tail(1).set_index(KEY)["train_loss"].reindex(table.index)
    fine = (table["status"] == "done") & np.isfinite(at_end)
    table["loss"] = at_end.where(fine, np.inf)
    table["grad_norm"] = table["grad_norm"].where(fine, np.inf)
    table[QUALITY] = table[QUALITY].where(fine)
    table["initial"] = groups.head(1).set_index(KEY)["train_loss"].reindex(table.index)
    return table.reset_index()


def per_rate(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one line per workload, method and lr: medians over seeds, and their spread.

    `diverged` is a number of runs. Validation loss and accuracies are medians of the runs that did
    not diverge, nan if `loss` is inf.
    """
    runs = per_run(frame)
    groups = runs.assign(bad=np.isinf(runs["loss"])).groupby(SETTING, sort=True)
    medians = [*QUALITY, "grad_norm", "seconds", "state_mb"]
    table = groups.agg(
        default=("default", "any"),
        loss=("loss", "median"),
        low=("loss", "min"),
        high=("loss", "max"),
        seeds=("seed", "nunique"),
        diverged=("bad", "sum"),
        **{name: (name, "median") for name in medians},
    ).reset_index()
    table[QUALITY] = table[QUALITY].where(np.isfinite(table["loss"]))
    return table


def defaults(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `per_rate` at each method's documented lr: one line per workload and method.

    Raises:
        ValueError: A method has two default learning rates on one workload.
    """
    table = per_rate(frame)
    table = table[table["default"]]
    for (workload, method), rates in table.groupby(["workload", "method"])["lr"]:
        if len(rates) > 1:
            raise ValueError(
                f"{method} has {len(rates)} default learning rates on {workload}: "
                f"{', '.join(f'{lr:g}' for lr in rates)}; report files of one benchmark only"
            )
    return table.reset_index(drop=True)


def tuned(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `per_rate` at the lr with the lowest final loss: one line per workload and method.

    The lr is chosen on the seeds that are reported, which flatters every method alike. Of equal
    losses the default wins, then the smaller lr. `rates` is the number of lr that were run;
    `at_end` says that the best of several is the lowest or the highest of them.
    """
    table = per_rate(frame)
    rates = table.groupby(["workload", "method"])["lr"]
    ends = (table["lr"] == rates.transform("min")) | (table["lr"] == rates.transform("max"))
    table["rates"] = rates.transform("size")
    table["at_end"] = ends & (table["rates"] > 1) & np.isfinite(table["loss"])
    table = table.sort_values(["loss", "default", "lr"], ascending=[True, False, True])
    best = table.drop_duplicates(["workload", "method"])
    return best.sort_values(["workload", "method"]).reset_index(drop=True)


def initial_loss(frame: pd.DataFrame) -> pd.Series:
    """Return the loss before training per workload: the median of the runs' first losses."""
    return per_run(frame).groupby("workload")["initial"].median()


def check_budgets(frame: pd.DataFrame) -> None:
    """Raise a ValueError if runs of one workload had different budgets."""
    for workload, budgets in frame.groupby("workload")["budget"]:
        found = sorted(budgets.unique())
        if len(found) > 1:
            raise ValueError(
                f"the runs of {workload} have budgets of {', '.join(f'{b:,g}' for b in found)} "
                "gradient evaluations and cannot be compared: report files of one budget only"
            )
