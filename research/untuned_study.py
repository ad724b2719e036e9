"""The study of Untuned: its tables and figure, from the committed rows.

    python research/untuned_study.py

Fills the blocks `bar`, `options` and `ablation` of docs/untuned-study.md and draws
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
    excess = final_losses(frame) / profile.target
    blocks = {
        "bar": cells(bar, excess, profile.scores),
        "options": options(pd.concat([frame, load("options")])),
        "ablation": ablation(pd.read_json(ABLATION, lines=True)),
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


def final_losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Return final losses at the default, methods by workloads."""
    grid = finals.defaults(frame).pivot(index="method", columns="workload", values="loss")
    return grid.rename(index=without_prefix)


def without_prefix(name: str) -> str:
    return name.removeprefix(PREFIX)


def cells(shares: pd.DataFrame, excess: pd.DataFrame, scores: pd.Series) -> str:
    """Bold: the share of the budget until the target. In brackets: final loss / target."""
    over = excess.loc[shares.index, shares.columns].map(lambda value: f"({value:.2g})")
    text = shares.map(lambda share: f"**{share:.2f}**").where(shares.notna(), over)
    found = [f"{count} of {shares.shape[1]}" for count in shares.notna().sum(axis=1)]
    text.insert(0, "reached", found)
    text.insert(1, "profile score", [f"{scores[name]:.2f}" for name in shares.index])
    return tables.Table("", "", text.rename_axis("method")).markdown()


def options(frame: pd.DataFrame) -> str:
    """Final training losses of Untuned as it is, then with one option each."""
    losses = final_losses(frame)
    chosen = load("options")["method"].unique()
    table = losses.loc[["Untuned", *map(without_prefix, chosen)], NETWORKS]
    return tables.Table("", "", table.rename_axis("with")).markdown()


def ablation(frame: pd.DataFrame) -> str:
    """Changes of the median final training loss with a constant halved, then doubled."""
    order = frame["constant"].unique()
    medians = frame.pivot_table(
        "train_loss", ["constant", "factor"], "workload", aggfunc="median", sort=False
    )
    changes = (medians / medians.loc["as it is", 1.0] - 1).map(lambda share: f"{100 * share:+.1f}")
    halved, doubled = (changes.xs(factor, level="factor") for factor in (0.5, 2.0))
    table = (halved + ", " + doubled).loc[[name for name in order if name != "as it is"]]
    return tables.Table("", "", table.rename_axis("constant")).markdown()


if __name__ == "__main__":
    main()
