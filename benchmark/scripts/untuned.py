"""The tables and the figure of docs/untuned.md, from the committed rows: `make untuned`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from stormplus_bench import figures, finals, markdown, profiles, rows
from stormplus_bench.plan import read_suite

OPEN = [
    "logistic-digits",
    "phase-retrieval",
    "nmf",
    "mlp-digits",
    "cnn-digits",
    "autoencoder-mnist",
    "resnet-cifar10",
    "gpt-shakespeare",
]
HELD_OUT = ["cnn-mnist", "bncnn-cifar10"]
TEN = OPEN + HELD_OUT
NETWORKS = ["autoencoder-mnist", "cnn-mnist", "bncnn-cifar10", "resnet-cifar10", "gpt-shakespeare"]
OPTIONS = read_suite("untuned-options")["solver"][0]["untuned-options"]["option"]
OURS = "Untuned"
PEERS = ["Prodigy", "DoG", "D-Adaptation", "Mechanic", "Schedule-Free"]
SHOWN = [OURS, *PEERS, "Adam", "STORM+", "simplified STORM+", "STORM+ mean"]
VARIANT = "Untuned: "
FOLDER = Path("docs")
PARTS = ("smooth", "networks", "untuned", "variants")


def main() -> None:
    found = [FOLDER / "results" / f"{name}.jsonl.gz" for name in PARTS]
    frame = rows.load_all(tuple(path for path in found if path.exists()))
    ten = frame[frame["workload"].isin(TEN) & ~frame["method"].str.startswith(VARIANT)]
    profile = profiles.performance_profile(ten)
    bar = share(profile.times, frame).reindex(index=SHOWN, columns=TEN)
    variants = frame[frame["workload"].isin(OPEN) & frame["method"].str.startswith((VARIANT, OURS))]
    times = profiles.time_to_target(variants[variants["default"]], profile.target)
    grid = times.pivot(index="method", columns="workload", values="time")
    study = share(grid, frame).reindex(columns=OPEN)
    study = study.loc[
        np.isfinite(study).sum(axis=1).sort_values(ascending=False, kind="stable").index
    ]
    study = study.loc[[OURS, *study.index.drop(OURS)]].rename(
        index=lambda name: name.removeprefix(VARIANT)
    )
    loss = finals.at(frame, best_lr=False).pivot(index="method", columns="workload", values="loss")
    excess = loss.rename(index=lambda name: name.removeprefix(VARIANT)) / profile.target
    sections = {
        "bar": cells(bar, excess, profile.scores),
        "study": cells(study, excess),
        "diverged": diverged(frame),
    }
    chosen = FOLDER / "results" / "options.jsonl.gz"
    if chosen.exists():
        sections["options"] = options(pd.concat([frame, rows.load(chosen)]))
    page = FOLDER / "untuned.md"
    content = page.read_text(encoding="utf-8")
    for name, text in sections.items():
        content = markdown.replace(content, text, name, str(page))
    page.write_text(content, encoding="utf-8")
    maps = {
        "Share of the budget until the target is reached: methods at their defaults": bar,
        "Untuned with one thing changed (open workloads)": study,
    }
    figures.target_maps(maps).savefig(
        FOLDER / "figures" / "untuned.png", dpi=130, metadata={"Software": None}
    )
    sys.stdout.write("\n\n".join(sections.values()) + "\n")


def share(times: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Times to the target as shares of the budgets."""
    return times / frame.groupby("workload")["budget"].max().reindex(times.columns)


def cells(grid: pd.DataFrame, excess: pd.DataFrame, scores: pd.Series | None = None) -> str:
    """The share of the budget at the target; in brackets the final loss over it, if missed."""
    table = pd.DataFrame(
        {
            name: [
                f"**{grid.loc[method, name]:.2f}**"
                if np.isfinite(grid.loc[method, name])
                else f"({excess.loc[method, name]:.2g})"
                for method in grid.index
            ]
            for name in grid.columns
        },
        index=grid.index,
    )
    table.insert(
        0,
        "reached",
        [f"{int(np.isfinite(grid.loc[m]).sum())} of {grid.shape[1]}" for m in grid.index],
    )
    if scores is not None:
        table.insert(1, "profile score", [f"{scores[m]:.2f}" for m in grid.index])
    return markdown.table(table, "method")


def options(frame: pd.DataFrame) -> str:
    """Final training losses with an option, and without one in the first line."""
    ends = finals.at(frame, best_lr=False).pivot(index="method", columns="workload", values="loss")
    names = [OURS, *OPTIONS]
    ends = ends.rename(index=lambda name: name.removeprefix(VARIANT)).loc[names, NETWORKS]
    return markdown.table(ends.map(lambda v: "" if np.isnan(v) else f"{v:.3g}"), "with")


def diverged(frame: pd.DataFrame) -> str:
    """How many runs at the default ended without a number."""
    runs = finals.per_run(frame[frame["default"] & frame["workload"].isin(TEN)])
    bad = runs[np.isinf(runs["loss"])].groupby("method").size().reindex(SHOWN, fill_value=0)
    return "Runs that diverged at the default, of 30: " + ", ".join(
        f"{name} {count}" for name, count in bad.items()
    )


if __name__ == "__main__":
    main()
