"""Write what the paper's experiment found: figure, table, claims."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure

from stormplus.bench import figures, rows
from stormplus.bench.finals import final, tuned
from stormplus.bench.paper_claims import METRICS, claims, with_epochs
from stormplus.bench.paper_figure import AXES, PANELS, figure
from stormplus.bench.paper_plan import SOLVERS, Scale
from stormplus.bench.statements import markdown_table
from stormplus.bench.style import ordered

WIDE = 1e4  # from here on a loss is written with an exponent


def report(frame: pd.DataFrame, scale: Scale) -> tuple[dict[str, Figure], str]:
    """The figures by name, and the text, as far as the rows go.

    Raises:
        ValueError: There is not even a run of the sweep.
    """
    sweep = frame[frame["workload"] == scale.sweep_name]
    if sweep.empty:
        raise ValueError(f"there is no run of the sweep {scale.sweep_name!r}")
    drawn = {"sweep": figures.sensitivity(sweep, scale.sweep_name)}
    best = tuned(sweep).set_index("method")
    parts = [_facts(frame), "### The sweep\n", _sweep_table(sweep)]
    long = frame[frame["workload"] == scale.long_name]
    long = long[long["lr"] == long["method"].map(best["lr"])]  # not of an earlier, smaller sweep
    if not set(SOLVERS) <= set(long["method"]):
        parts.append(f"The long runs of {scale.long_name} are not complete.\n")
        return drawn, "\n".join(parts)
    long = with_epochs(long, scale.images)
    drawn["paper"] = figure(long, best["lr"].to_dict())
    parts += ["### The long runs\n", _long_table(long)]
    for axis, name in AXES.items():
        parts.append(f"### The paper's claims, at equal {name}\n")
        parts += [_claims_table(long, axis, ours) for ours in ("STORM+", "STORM+ mean")]
    return drawn, "\n".join(parts)


def write(journal: Path, scale: Scale, folder: Path) -> list[Path]:
    """The files that could be made: the sweep alone is enough for a part of them."""
    try:
        drawn, text = report(rows.load(journal, on_cut="drop"), scale)
    except ValueError as error:
        raise ValueError(f"{journal}: {error}") from error
    written = []
    for name, picture in drawn.items():
        written.append(folder / f"{name}.png")
        save(picture, written[-1])
    written.append(folder / "paper.md")
    written[-1].write_text(text)
    return written


def save(picture: Figure, file: Path) -> None:
    """Without a date or a version in it: the same rows give the same file."""
    picture.savefig(file, dpi=130, metadata={"Software": None})


def _facts(frame: pd.DataFrame) -> str:
    versions = json.loads(frame["versions"].iloc[-1])
    named = ", ".join(f"{name} {versions.get(name, '?')}" for name in ("stormplus", "torch"))
    machines = "; ".join(sorted(frame["machine"].unique()))
    return f"Machine: {machines}; {named}; seed 0, one run each.\n"


def _sweep_table(sweep: pd.DataFrame) -> str:
    ends = final(sweep).pivot(index="method", columns="lr", values="loss")
    cells = ends.apply(lambda line: line.map(partial(_cell, lowest=line.min())), axis=1)
    cells = cells.loc[ordered(cells.index)].rename(columns="{:g}".format)
    ends_of_range = [row.method for row in tuned(sweep).itertuples() if row.at_end]
    note = "Training loss at the end of each run; the best rate is bold."
    if ends_of_range:
        note += (
            f" At an end of its range, so a wider one might do better: {', '.join(ends_of_range)}."
        )
    return f"{markdown_table(cells, 'method')}\n\n{note}\n"


def _cell(value: float, lowest: float) -> str:
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "diverged"
    text = f"{value:.3f}" if value < WIDE else f"{value:.1e}"
    return f"**{text}**" if value == lowest else text


def _long_table(long: pd.DataFrame) -> str:
    lines = {}
    for method in ordered(long["method"]):
        end = long[long["method"] == method].sort_values("evaluations").iloc[-1]
        fine = end["status"] == "done"
        lines[method] = {
            "lr": f"{end['lr']:g}",
            "epochs": f"{end['epoch']:.2f}",
            "evaluations": f"{end['evaluations']:.0f}",
            **{PANELS[name]: f"{end[name]:.3f}" if fine else "diverged" for name in METRICS},
            "s": f"{end['seconds']:.0f}",
        }
    return markdown_table(pd.DataFrame.from_dict(lines, orient="index"), "method") + "\n"


def _claims_table(long: pd.DataFrame, axis: str, ours: str) -> str:
    found = claims(long, axis, ours)
    table = pd.DataFrame(
        {"here": [c.verdict for c in found], "numbers": [c.numbers for c in found]},
        index=[c.text for c in found],
    )
    return markdown_table(table, f"the paper says (its STORM+: {ours})") + "\n"
