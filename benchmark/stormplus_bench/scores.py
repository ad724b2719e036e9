"""Scores of the benchmark: pure functions of the frame that `rows.load` gives.

**Cost of not tuning.** `lost` is the share of the possible decrease that a method at its
default leaves on the table:

    lost = (default's final loss - best) / (initial loss - best)

with `best` the lowest final loss of any method at any lr. 0 is as good as tuning everything, 1
is no better than not training, more is worse than that, inf is divergence. It is linear, not
logarithmic: it stays defined where the best loss is 0, does not depend on where a loss has its
zero (entropy, regularisers), and does not make a difference between 1e-6 and 1e-9 look like
one between 1 and 1e-3. The plain `ratio` to the best loss is given beside it.

**Wins, ties, losses.** A method wins on a workload if its final losses over seeds all lie below
all of the rival's, and the medians differ by more than `TOLERANCE` of the possible decrease.
Otherwise it is a tie. A method that diverges (in half of its runs or more) loses against one
that does not. With one seed only the tolerance decides.
"""

from __future__ import annotations

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals
from stormplus_bench.methods import OURS
from stormplus_bench.profiles import targets, time_to_target

TOLERANCE = 0.01
OUTCOMES = ("win", "tie", "loss")


def cost_of_not_tuning(frame: pd.DataFrame) -> pd.DataFrame:
    """For each workload and method what its default loses, and the ratio to the best.

    Columns: workload, method, lr, loss, initial, best, best_method, best_lr, lost, ratio.
    `lost` is nan where no run of the workload ends below the initial loss.
    """
    columns = ["workload", "method", "lr", "loss", "low", "high"]
    best = finals.best_tuned(frame).set_index("workload")
    new = finals.defaults(frame)[columns].copy()
    for name, source in (("best", "loss"), ("best_method", "method"), ("best_lr", "lr")):
        new[name] = new["workload"].map(best[source])
    new["initial"] = new["workload"].map(finals.initial_loss(frame))
    possible = new["initial"] - new["best"]
    new["lost"] = (new["loss"] - new["best"]) / possible.where(possible > 0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = new["loss"].to_numpy() / new["best"].to_numpy()
    new["ratio"] = np.where(new["loss"] == new["best"], 1.0, ratio)
    new.loc[np.isinf(new["best"]), "ratio"] = np.nan
    return new


def mean_lost(cost: pd.DataFrame) -> pd.DataFrame:
    """For each method the mean of `lost` over its workloads, none counting for more than 1.

    Means over different workloads cannot be compared. So only a method that ran all of them has
    a `place`; the others come last, with a `note` that tells how many they ran.

    Returns:
        By method, in the order of the places: mean, place (nan if none), note (a text).
    """
    lost = cost["lost"].clip(upper=1.0).groupby(cost["method"])
    table = pd.DataFrame({"mean": lost.mean(), "number": lost.count()})
    total = cost["workload"][cost["lost"].notna()].nunique()
    table["part"] = table["number"] < total
    table = table.sort_values(["part", "mean"], kind="stable")
    table["note"] = [f" ({n} of {total} workloads)" if n < total else "" for n in table["number"]]
    ranked = ~table["part"] & table["mean"].notna()
    table["place"] = ranked.cumsum().where(ranked)
    return table[["mean", "place", "note"]]


def cost_map(cost: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What the map of `lost` shows, methods by workloads and their mean, the least costly first.

    Returns:
        The values, and what to write for each in per cent: "·" where there was no run.
    """
    mean = mean_lost(cost)
    grid, ran = (
        cost.pivot(index="method", columns="workload", values=name).reindex(mean.index)
        for name in ("lost", "loss")
    )
    texts = grid.map(per_cent).where(ran.notna(), "·")
    grid.insert(len(grid.columns), "mean", mean["mean"])
    texts.insert(len(texts.columns), "mean", mean["mean"].map(per_cent))
    return grid, texts


def per_cent(value: float) -> str:
    """`lost` in per cent, short enough for a cell of a table."""
    if np.isnan(value):
        return "n/a"
    if np.isinf(value):
        return "div."
    value *= 100
    if value == 0 or value > 999:
        return ">999" if value else "0"
    return "<0.1" if 0 < value < 0.095 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def wins_ties_losses(
    frame: pd.DataFrame, method: str, *, best_lr: bool = False, tolerance: float = TOLERANCE
) -> pd.DataFrame:
    """`method` against every other method, workload by workload.

    Both at their defaults, or with `best_lr` both at their best lr. Workloads that one of the
    two was not run on are left out; with `best_lr` also those that it ran one lr on.

    Returns:
        Columns workload, rival, loss, rival_loss, outcome ("win", "tie", "loss" of `method`).

    Raises:
        ValueError: There is no such method in the rows.
    """
    ends = finals.at(frame, best_lr=best_lr)
    if method not in set((frame if best_lr else ends)["method"]):
        raise ValueError(
            f"no run of {method!r}" + ("" if best_lr else " at its default lr") + " in the rows; "
            f"there are {', '.join(sorted(set(frame['method'])))}"
        )
    mine = ends[ends["method"] == method]
    pairs = mine.merge(ends[ends["method"] != method], on="workload", suffixes=("", "_rival"))
    best = finals.best_tuned(frame).set_index("workload")["loss"]
    margin = tolerance * (finals.initial_loss(frame) - best).clip(lower=0.0)
    allowed = pairs["workload"].map(margin).to_numpy()
    outcomes = [
        _outcome((a.loss, a.low, a.high), (a.loss_rival, a.low_rival, a.high_rival), margin)
        for a, margin in zip(pairs.itertuples(), allowed)
    ]
    names = {"method_rival": "rival", "loss_rival": "rival_loss"}
    new = pairs.rename(columns=names)[["workload", "rival", "loss", "rival_loss"]]
    return new.assign(outcome=pd.Series(outcomes, index=new.index, dtype="str"))


Ends = tuple[float, float, float]  # median, low, high


def _outcome(mine: Ends, rival: Ends, margin: float) -> str:
    if np.isinf(mine[0]) or np.isinf(rival[0]):
        return "tie" if mine[0] == rival[0] else "win" if np.isinf(rival[0]) else "loss"
    if not abs(mine[0] - rival[0]) > margin:
        return "tie"
    if mine[2] < rival[1]:
        return "win"
    return "loss" if rival[2] < mine[1] else "tie"


def count(duels: pd.DataFrame) -> pd.DataFrame:
    """For each rival the number of wins, ties and losses."""
    table = pd.crosstab(duels["rival"], duels["outcome"])
    return table.reindex(columns=list(OUTCOMES), fill_value=0)


def against_the_best(
    frame: pd.DataFrame, method: str, *, best_lr: bool = False, tolerance: float = TOLERANCE
) -> pd.DataFrame:
    """`method` against the best rival of each workload; the library's own methods are no rivals."""
    duels = wins_ties_losses(frame, method, best_lr=best_lr, tolerance=tolerance)
    duels = duels[~duels["rival"].isin(OURS)].sort_values("rival_loss", kind="stable")
    best = duels.groupby("workload", sort=True).head(1)
    return best.sort_values("workload").reset_index(drop=True)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Everything in one table: one line for each workload and method."""
    keys = ["workload", "method"]
    goal = targets(frame)
    times = time_to_target(frame, goal)
    ends = finals.defaults(frame).merge(times, on=["workload", "method", "lr"], how="left")
    best = finals.tuned(frame)[[*keys, "lr", "rates", "at_end", "loss", "low", "high"]]
    best = best.rename(columns={name: f"tuned_{name}" for name in ("lr", "loss", "low", "high")})
    cost = cost_of_not_tuning(frame)[[*keys, "lost", "ratio"]]
    counts = finals.per_run(frame).assign(bad=lambda t: np.isinf(t["loss"])).groupby(keys)["bad"]
    totals = counts.agg(runs="size", runs_diverged="sum").reset_index()
    return best.merge(ends, on=keys, how="left").merge(cost, on=keys, how="left").merge(totals)
