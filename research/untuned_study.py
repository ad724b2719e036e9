"""The study of Untuned: its tables and figure, from the committed rows.

    python research/untuned_study.py

Fills the blocks `bar`, `options`, `ablation` and `left-out` of docs/untuned-study.md and draws
docs/figures/untuned.png. The variants are no longer in the tree; their rows are
docs/results/variants.jsonl.gz and docs/results/options.jsonl.gz.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from stormplus_bench import figures, finals, profiles, rows, tables

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "untuned-study.md"
FIGURE = DOCS / "figures" / "untuned.png"
ABLATION = Path(__file__).parent / "results" / "untuned_ablation.jsonl"
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
PREFIX = "Untuned: "  # of the variants' names


def main() -> None:
    frame = load("smooth", "networks", "untuned", "variants")
    is_variant = frame["method"].str.startswith(PREFIX)
    ten = frame[frame["workload"].isin(TEN) & ~is_variant]
    profile = profiles.performance_profile(ten)
    bar = budget_share(profile.times, frame).reindex(index=METHODS, columns=TEN)
    study = study_shares(frame[is_variant | (frame["method"] == "Untuned")], profile.target)
    blocks = {
        "bar": summary(bar, profile.scores, validation(frame)),
        "options": options(pd.concat([frame, load("options")])),
        "ablation": ablation(pd.read_json(ABLATION, lines=True)),
        "left-out": left_out(pd.read_json(ABLATION, lines=True)),
    }
    PAGE.write_text(tables.fill(PAGE.read_text("utf-8"), blocks, str(PAGE)), "utf-8")
    maps = {
        "Share of the budget until the target is reached: methods at their defaults": bar,
        "Untuned with one thing changed (open workloads)": study,
    }
    drawn = figures.heat_maps(maps, reached, lambda share: 1.05 - share, "Blues")
    drawn.savefig(FIGURE, dpi=130, metadata={"Software": None})


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
    return tables.Table("", "", frame.rename_axis("method")).markdown()


def options(frame: pd.DataFrame) -> str:
    """Final training and validation losses of Untuned as it is, then with one option each."""
    chosen = ["Untuned", *map(without_prefix, load("options")["method"].unique())]
    train, valid = (
        final_losses(frame, which).loc[chosen, NETWORKS].map(tables.number)
        for which in ("loss", "valid_loss")
    )
    table = (train + " / " + valid).replace(" / ", "")
    return tables.Table("", "", table.rename_axis("with")).markdown()


def ablation(frame: pd.DataFrame) -> str:
    """Mean changes of the losses in per cent: a constant halved and doubled, or another form."""
    table = {
        **{name: relative_changes(part, "train_loss") for name, part in frame.groupby("workload")},
        "validation loss of all three": relative_changes(frame, "valid_loss"),
    }
    return tables.Table("", "", pd.DataFrame(table).rename_axis("changed")).markdown()


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
    """Return what is best on all workloads but one, and how it changes the loss on that one."""
    columns = {}
    for loss, title in (("train_loss", "training loss"), ("valid_loss", "validation loss")):
        means = changes_of(frame, loss).dropna().T.groupby(level="workload").mean()
        chosen = {name: means.drop(name).mean().idxmin() for name in means.index}
        columns[f"by {title}"] = pd.Series(
            {k: f"{described(*best)}: {means.loc[k, best]:+.1f}" for k, best in chosen.items()}
        )
    return tables.Table("", "", pd.DataFrame(columns).rename_axis("left out")).markdown()


def described(constant: str, factor: float) -> str:
    return {0.5: f"{constant} halved", 2.0: f"{constant} doubled"}.get(factor, constant)


if __name__ == "__main__":
    main()
