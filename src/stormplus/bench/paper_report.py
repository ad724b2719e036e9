"""Write what the paper's experiment found: figure, table, claims."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus.bench import figures, rows
from stormplus.bench.finals import tuned
from stormplus.bench.paper_claims import METRICS, claims, with_epochs
from stormplus.bench.paper_figure import AXES, figure
from stormplus.bench.paper_plan import SOLVERS, Scale
from stormplus.bench.style import ordered


def write(journal: Path, scale: Scale, folder: Path) -> list[Path]:
    """The files that could be made: the sweep alone is enough for a part of them."""
    frame = rows.load(journal, on_cut="drop")
    sweep = frame[frame["workload"] == scale.sweep_name]
    if sweep.empty:
        raise ValueError(f"{journal} has no run of the sweep {scale.sweep_name!r}")
    written = [folder / "sweep.png", folder / "paper.md"]
    figures.sensitivity(sweep, scale.sweep_name).savefig(written[0], dpi=130)
    best = tuned(sweep).set_index("method")
    parts = [_facts(frame), "## The sweep\n", _sweep_table(sweep)]
    long = frame[frame["workload"] == scale.long_name]
    long = long[long["lr"] == long["method"].map(best["lr"])]  # not of an earlier, smaller sweep
    if set(SOLVERS) <= set(long["method"]):
        long = with_epochs(long, scale.images)
        written.insert(0, folder / "paper.png")
        figure(long, best["lr"].to_dict()).savefig(written[0], dpi=130)
        parts += ["## The long runs\n", _long_table(long)]
        for axis, name in AXES.items():
            parts.append(f"## The paper's claims, at equal {name}\n")
            parts += [_claims_table(long, axis, ours) for ours in ("STORM+", "STORM+ mean")]
    else:
        parts.append(f"The long runs of {scale.long_name} are not complete.\n")
    written[-1].write_text("\n".join(parts))
    return written


def _facts(frame: pd.DataFrame) -> str:
    versions = json.loads(frame["versions"].iloc[-1])
    named = ", ".join(f"{name} {versions.get(name, '?')}" for name in ("stormplus", "torch"))
    machines = "; ".join(sorted(frame["machine"].unique()))
    return f"Machine: {machines}; {named}; seed 0, one run each.\n"


def _sweep_table(sweep: pd.DataFrame) -> str:
    rates = sorted(sweep["lr"].unique())
    ends = sweep.sort_values("evaluations").groupby(["method", "lr"])["train_loss"].last()
    lines = ["| method | " + " | ".join(f"{lr:g}" for lr in rates) + " |"]
    lines.append("|---" * (len(rates) + 1) + "|")
    for method in ordered(sweep["method"]):
        found = {lr: ends.get((method, lr)) for lr in rates}
        lowest = min((v for v in found.values() if v is not None and math.isfinite(v)), default=0)
        lines.append(f"| {method} | " + " | ".join(_cell(v, lowest) for v in found.values()) + " |")
    ends_of_range = [row.method for row in tuned(sweep).itertuples() if row.at_end]
    note = "Training loss at the end of each run; the best rate is bold."
    if ends_of_range:
        note += (
            f" At an end of its range, so a wider one might do better: {', '.join(ends_of_range)}."
        )
    return "\n".join(lines) + f"\n\n{note}\n"


def _cell(value: float | None, lowest: float) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return "diverged"
    return f"**{value:.3f}**" if value == lowest else f"{value:.3f}"


def _long_table(long: pd.DataFrame) -> str:
    lines = ["| method | lr | epochs | evaluations | training loss | test loss |"]
    lines[0] += " training accuracy | test accuracy | s |"
    lines.append("|---" * 9 + "|")
    for method in ordered(long["method"]):
        end = long[long["method"] == method].sort_values("evaluations").iloc[-1]
        fine = end["status"] == "done"
        numbers = " | ".join(f"{end[name]:.3f}" if fine else "diverged" for name in METRICS)
        lines.append(
            f"| {method} | {end['lr']:g} | {end['epoch']:.2f} | {int(end['evaluations'])} | "
            f"{numbers} | {end['seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _claims_table(long: pd.DataFrame, axis: str, ours: str) -> str:
    lines = [f"| the paper says (its STORM+: {ours}) | here | numbers |", "|---|---|---|"]
    lines += [f"| {c.text} | {c.verdict} | {c.numbers} |" for c in claims(long, axis, ours)]
    return "\n".join(lines) + "\n"
