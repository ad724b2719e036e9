"""The study of Untuned: its tables and figure, from the committed rows.

    python research/untuned_study.py

Fills the tables of docs/untuned-study.md and draws docs/figures/untuned.png. The variants of its
second map are no longer in the tree; their rows are docs/results/variants.jsonl.gz.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from stormplus_bench import figures, finals, profiles, rows, tables

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "untuned-study.md"
FIGURE = DOCS / "figures" / "untuned.png"
ABLATION = Path(__file__).parent / "results" / "untuned_ablation.jsonl"
OPTIONS = Path(__file__).parent / "results" / "untuned_options.jsonl"
CASES = Path(__file__).parent / "results" / "untuned_cases.jsonl"
# Reported cases that `stormplus robust` has.
ROBUST = [
    *("linear regression on raw targets", "bag of 20,000 words"),
    *("an image of 3 x 128 x 128 from zero", "a vector of 50,000 numbers from zero"),
    "abilities and difficulties from zero",
]
# Workloads of the study; the last two were held out for the earlier form of the rule.
OPEN = [
    *("logistic-digits", "phase-retrieval", "nmf", "mlp-digits", "cnn-digits"),
    *("autoencoder-mnist", "resnet-cifar10", "gpt-shakespeare"),
]
TEN = [*OPEN, "cnn-mnist", "bncnn-cifar10"]
DIGITS = ["mlp-digits", "cnn-digits"]
NETWORKS = ["autoencoder-mnist", "cnn-mnist", "bncnn-cifar10", "resnet-cifar10", "gpt-shakespeare"]
METHODS = [
    *("Untuned", "Prodigy", "DoG", "D-Adaptation", "Mechanic", "Schedule-Free", "Adam"),
    "STORM+",
]
SMALL = "resnet-noisy-digits"  # is learned by heart: judged by validation
PREFIX = "Untuned: "  # of the variants' names


def main() -> None:
    frame = load("smooth", "networks", "untuned", "variants")
    is_variant = frame["method"].str.startswith(PREFIX)
    ten = frame[frame["workload"].isin(TEN) & ~is_variant]
    profile = profiles.performance_profile(ten)
    bar = budget_share(profile.times, frame).reindex(index=METHODS, columns=TEN)
    changed = pd.read_json(ABLATION, lines=True)
    # Without language models and pure noise, which have only some of the forms.
    changed = changed[~changed["workload"].str.contains("gpt|noise,|noise in")]
    study = study_shares(frame[is_variant | (frame["method"] == "Untuned")], profile.target)
    blocks = {
        "bar": summary(bar, profile.scores, validation(frame)),
        "cases": cases(),
        "options": options(),
        "ablation": ablation(changed),
        "left-out": left_out(changed),
    }
    PAGE.write_text(tables.fill(PAGE.read_text("utf-8"), blocks, str(PAGE)), "utf-8")
    maps = {
        "Share of the budget until the target is reached: methods at their defaults": bar,
        "Untuned with one thing changed (open workloads)": study,
    }
    drawn = figures.heat_maps(maps, reached, lambda share: 1.05 - share, "Blues")
    drawn.savefig(FIGURE, dpi=130, metadata={"Software": None})


def markdown(table: pd.DataFrame) -> str:
    return tables.Table("", "", table).markdown()


def load(*names: str) -> pd.DataFrame:
    return rows.load(*(DOCS / "results" / f"{name}.jsonl.gz" for name in names))


def reached(share: float) -> str:
    return f"{share:.2f}" if np.isfinite(share) else "missed"


def budget_share(times: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Return times to the target as shares of the budget; nan if missed."""
    budgets = frame.groupby("workload")["budget"].max().reindex(times.columns)
    return (times / budgets).replace(np.inf, np.nan)


def study_shares(frame: pd.DataFrame, target: pd.Series) -> pd.DataFrame:
    """Return the shares of Untuned, then of its variants, most targets reached first."""
    frame = frame[frame["default"] & frame["workload"].isin(OPEN)]
    times = profiles.time_to_target(frame, target)
    grid = times.pivot(index="method", columns="workload", values="time")
    shares = budget_share(grid, frame)[OPEN].rename(index=without_prefix)
    order = shares.notna().sum(axis=1).sort_values(ascending=False, kind="stable").index
    return shares.loc[["Untuned", *order.drop("Untuned")]]


def final_losses(frame: pd.DataFrame, which: str = "loss") -> pd.DataFrame:
    """Return final losses at the default, methods by workloads; `valid_loss` is the other one."""
    grid = finals.defaults(frame).pivot(index="method", columns="workload", values=which)
    return grid.rename(index=without_prefix)


def validation(frame: pd.DataFrame) -> pd.Series:
    """Return validation losses over the best of the methods', geometric means over networks."""
    losses = final_losses(frame, "valid_loss").loc[METHODS, [*DIGITS, *NETWORKS]]
    return np.exp(np.log(losses / losses.min()).mean(axis=1))


def without_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


def summary(shares: pd.DataFrame, scores: pd.Series, valid: pd.Series) -> str:
    """One line per method; the figure has its shares of the budget, workload by workload."""
    columns = {
        "reached": [f"{count} of {shares.shape[1]}" for count in shares.notna().sum(axis=1)],
        "profile score": [f"{scores[name]:.2f}" for name in shares.index],
        "validation loss": [f"{valid[name]:.2f}" for name in shares.index],
    }
    frame = pd.DataFrame(columns, shares.index)
    return markdown(frame.rename_axis("method"))


def cases() -> str:
    """Return the final values of reported cases, one per seed, beside Adam's at 1e-3."""
    robust = finals.defaults(load("robust")).rename(columns={"workload": "case", "loss": "value"})
    found = pd.concat([robust, pd.read_json(CASES, lines=True)])
    names = [*ROBUST, *found["case"][~found["case"].isin(robust["case"])].unique()]
    values = found.groupby(["case", "method"])["value"].agg(
        lambda seeds: ", ".join(
            f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in seeds
        )
    )
    table = values.unstack().loc[names, ["Untuned", "Adam"]].rename_axis(columns=None)
    return markdown(table)


def options() -> str:
    """Return mean changes of the losses in per cent, by option, on the seeds that were run."""
    found = rows.load(OPTIONS)
    frame = pd.concat([found, load("untuned")])
    frame["constant"] = frame["method"].map(without_prefix).replace("Untuned", "as it is")
    chosen = frame["workload"].isin(found["workload"]) & frame["seed"].isin(found["seed"])
    ends = frame[chosen & (frame["evaluations"] == frame["budget"])].assign(factor=1.0)
    losses = {"training loss": "train_loss", "validation loss": "valid_loss"}
    table = {title: relative_changes(ends, loss) for title, loss in losses.items()}
    return markdown(pd.DataFrame(table).rename_axis("with"))


def ablation(frame: pd.DataFrame) -> str:
    """Mean changes of the losses in per cent: a constant halved and doubled, or another form."""
    small = frame["workload"] == SMALL
    table = {
        name: relative_changes(part, "train_loss")
        for name, part in frame[~small].groupby("workload")
    }
    table[f"{SMALL}, validation"] = relative_changes(frame[small], "valid_loss")
    table["validation loss of all"] = relative_changes(frame, "valid_loss")
    order = [*frame["constant"].drop_duplicates(), "standard error"]
    return markdown(pd.DataFrame(table).reindex(order).dropna().rename_axis("changed"))


def relative_changes(frame: pd.DataFrame, loss: str) -> pd.Series:
    """Return means over runs by what was changed, and the median of their standard errors."""
    changes = changes_of(frame, loss)
    means = changes.mean(axis=1).map("{:+.1f}".format).groupby(level=0, sort=False).agg(", ".join)
    means["standard error"] = f"{changes.sem(axis=1).median():.1f}"
    return means


def changes_of(frame: pd.DataFrame, loss: str) -> pd.DataFrame:
    """Return changes in per cent, of what was changed by (workload, seed)."""
    runs = frame.pivot_table(loss, ["constant", "factor"], ["workload", "seed"], sort=False)
    return 100 * (runs / runs.loc["as it is", 1.0] - 1).drop("as it is")


def left_out(frame: pd.DataFrame) -> str:
    """Say how the best change on all workloads but one changes the loss on that one."""
    parts = []
    trained = frame[frame["workload"] != SMALL]
    for title, loss, runs in (
        ("training loss", "train_loss", trained),
        ("validation loss", "valid_loss", frame),
    ):
        means = changes_of(runs, loss).dropna().T.groupby(level="workload").mean()
        chosen = {name: means.drop(name).mean().idxmin() for name in means.index}
        changes = ", ".join(f"{means.loc[name, best]:+.1f}" for name, best in chosen.items())
        parts.append(f"its {title} by {changes} %")
    return (
        "Leave one workload out, in the order above: the best change on the others changes "
        + ", ".join(parts)
        + "."
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
