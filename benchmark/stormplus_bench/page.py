"""The report as one HTML page that needs no network: figures, script and style are inside.

The figures are matplotlib's SVG, not plotly's: the same drawing goes to the page, to the
README and to print, and the page is a third of the size of plotly's script alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from importlib import resources

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals, scores
from stormplus_bench.figures import line_sample, slug
from stormplus_bench.methods import OURS, few
from stormplus_bench.profiles import CLASSICS, TARGET_AT, performance_profile
from stormplus_bench.sentences import RULES, Facts, Findings
from stormplus_bench.svg import decoration, inline, to_svg

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# column of `scores.table`, heading, what it is
COLUMNS = (
    ("workload", "workload", ""),
    ("method", "method", ""),
    ("loss", "loss, default lr", "final training loss, median over seeds"),
    ("low", "lowest", "of the seeds, at the default lr"),
    ("high", "highest", "of the seeds, at the default lr"),
    ("lost", "lost, %", "share of the possible decrease that the default leaves on the table"),
    ("ratio", "ratio to best", "to the best final loss of any method at any lr"),
    ("tuned_loss", "loss, best lr", "final training loss, median over seeds"),
    ("lr", "default lr", ""),
    (
        "tuned_lr",
        "best lr",
        "of those run; (end): at an end of the range; (only): no other was run",
    ),
    ("time", "evaluations to target", "at the default lr"),
    ("grad_norm", "gradient norm", "at the end, at the default lr"),
    ("valid_loss", "valid. loss", "at the end, at the default lr"),
    ("valid_accuracy", "valid. accuracy", "at the end, at the default lr"),
    ("seconds", "seconds", "a run, at the default lr"),
    ("peak_memory_mb", "peak MB", "of the process"),
    ("state_mb", "state MB", "of the optimizer"),
    ("runs", "runs", "at all lr and seeds"),
    ("runs_diverged", "diverged", "of these runs"),
)
COST = (
    "A dot: not run. div.: diverged in half of the runs or more. n/a: no run of any method ends "
    "below the initial loss. The mean counts no workload for more than 100 %."
)
PROFILE = (
    f"The target of a workload is the training loss that the best of {', '.join(CLASSICS)} "
    f"at its best lr reaches in {TARGET_AT:.0%} of the budget. "
    "A line shows on which share of the workloads a method is there within τ times the gradient "
    "evaluations of the fastest. The score is the area under the line, from 1 to 4, as in "
    "AlgoPerf (Dahl et al., 2023). At the best lr, methods that ran one learning rate on one of "
    "the workloads are left out. A workload without a run counts as a missed target."
)
_TEXTS = ("workload", "method")


def build(frame: pd.DataFrame, found: Findings, figures: Mapping[str, str]) -> str:
    """The page.

    Args:
        frame: The rows.
        found: From the rows.
        figures: SVG documents: `cost_of_not_tuning`, `performance_profile`, and for each
            workload `curves_<workload>` and `sensitivity_<workload>`.
    """
    facts = found.facts
    texts = [text for part in found.sentences.values() for text in part]
    items = "".join(f"<li>{_bold(text)}</li>" for text in texts)
    at = {"at the defaults": False, "at the best lr": True}
    ends = {words: finals.at(frame, best_lr=best) for words, best in at.items()}
    return f"""<!DOCTYPE html>
<html lang="en-GB"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>STORM+ benchmark</title><style>{_asset("page.css")}</style></head><body>
<header><h1>STORM+ benchmark</h1><p>{html.escape(facts.sentence())}</p>{_facts(facts)}</header>
<main>
<h2>Where STORM+ wins, ties and loses</h2><ul>{items}</ul>
<p>Wins / ties / losses over the workloads, against each other method:</p>
<div class="scroll">{_plain_table(found.duels, "against")}</div>
<p class="small">{html.escape(RULES)}</p>
<h2>Cost of not tuning</h2>
{_figure(figures["cost_of_not_tuning"], _cost_text(frame), COST)}
<h2>Performance profiles</h2>
{_figure(figures["performance_profile"], _profile_text(frame), f"{PROFILE} {found.ceiling}")}
<div class="scroll">{_plain_table(found.scores, "method")}</div>
<h2>Methods</h2>{_choice_of_methods(facts.methods)}
<h2>Curves and learning rates</h2>
<div class="controls"><label>Workload {_select("figures-of", facts.workloads)}</label></div>
{"".join(_workload(ends, name, figures) for name in facts.workloads)}
<h2>All results</h2>
<div class="controls"><label>Workload {_select("lines-of", facts.workloads)}</label>
<span class="small">A click on a heading sorts.</span></div>
<div class="scroll">{_table(scores.table(frame))}</div>
</main>
<script>{_asset("page.js")}</script></body></html>
"""


def _asset(name: str) -> str:
    return (resources.files("stormplus_bench") / "assets" / name).read_text(encoding="utf-8")


def _bold(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))


def _facts(facts: Facts) -> str:
    budgets = ", ".join(
        f"{name} {budget:,} (batch {facts.batch_sizes[name]})"
        for name, budget in facts.budgets.items()
    )
    entries = {
        "Machine": "; ".join(facts.machines) or "not recorded",
        "Versions": ", ".join(f"{k} {v}" for k, v in facts.versions.items()) or "not recorded",
        "Seeds": ", ".join(map(str, facts.seeds)),
        "Budgets, in gradient evaluations": budgets,
        "Runs": f"{facts.runs:,}, of which {facts.diverged:,} diverged",
        "Best rates": facts.rates(),
        "Examples that the losses are measured on": facts.examples(),
    }
    items = "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in entries.items() if v)
    return f'<dl class="facts">{items}</dl>'


def _figure(svg: str, label: str, caption: str) -> str:
    return f"<figure>{inline(svg, label)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _select(name: str, workloads: Iterable[str]) -> str:
    options = "".join(f"<option>{html.escape(name)}</option>" for name in workloads)
    return f'<select id="{name}"><option value="">all</option>{options}</select>'


def _choice_of_methods(methods: list[str]) -> str:
    boxes = []
    for method in methods:
        name = slug(method)
        line = decoration(to_svg(line_sample(method), f"line-{name}"))
        boxes.append(
            f'<label><input type="checkbox" value="{name}" checked>{line}'
            f"{html.escape(method)}</label>"
        )
    chosen = " ".join(map(slug, few(methods)))
    return (
        '<fieldset class="methods"><legend>Shown in the curves, the profiles and the table'
        f'</legend>{"".join(boxes)}<div class="controls">'
        f'<button type="button" data-methods="*">all</button>'
        f'<button type="button" data-methods="{chosen}">a few</button></div></fieldset>'
    )


def _workload(ends: Mapping[str, pd.DataFrame], workload: str, figures: Mapping[str, str]) -> str:
    name = html.escape(workload, quote=True)
    curves = f"Training loss on {workload}."
    for words, table in ends.items():
        lines = table[table["workload"] == workload].sort_values("loss").itertuples()
        curves += f" Final, {words}: " + ", ".join(f"{e.method} {show(e.loss)}" for e in lines)
    rates = f"Final training loss and gradient norm on {workload} against the learning rate."
    return (
        f'<section class="workload" data-workload="{name}"><h3>{name}</h3>'
        + _figure(figures[f"curves_{workload}"], curves, "Training loss.")
        + _figure(
            figures[f"sensitivity_{workload}"],
            rates,
            "Learning-rate sensitivity: the wider the flat part, the less there is to tune.",
        )
        + "</section>"
    )


def _cost_text(frame: pd.DataFrame) -> str:
    mean = scores.mean_lost(scores.cost_of_not_tuning(frame))
    means = ", ".join(f"{name} {value:.1%}{note}" for name, value, _, note in mean.itertuples())
    return f"Map of the cost of not tuning. Mean over the workloads: {means}"


def _profile_text(frame: pd.DataFrame) -> str:
    result = performance_profile(frame).scores
    values = ", ".join(f"{name} {value:.2f}" for name, value in result.items())
    return f"Performance profiles. Scores at the default learning rates: {values}"


def _plain_table(table: pd.DataFrame, corner: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(str(n))}</th>' for n in table.columns)
    lines = "".join(
        f'<tr{_ours(str(name))}><th scope="row" class="text">{html.escape(str(name))}</th>'
        + "".join(f"<td>{html.escape(str(value))}</td>" for value in line)
        + "</tr>"
        for name, line in zip(table.index, table.to_numpy())
    )
    head = f'<thead><tr><th class="text">{corner}</th>{head}</tr></thead>'
    return f"<table>{head}<tbody>{lines}</tbody></table>"


def _ours(method: str) -> str:
    return ' class="ours"' if method in OURS else ""


def _table(table: pd.DataFrame) -> str:
    head = "".join(
        f'<th scope="col" aria-sort="none" data-key="{key}" title="{html.escape(what, quote=True)}"'
        + (' class="text" data-kind="text">' if key in _TEXTS else ' data-kind="number">')
        + f'<button type="button">{html.escape(title)}</button></th>'
        for key, title, what in COLUMNS
    )
    lines = []
    for line in table.to_dict("records"):
        mark = " (only)" if line["rates"] == 1 else " (end)" if line["at_end"] else ""
        cells = "".join(
            _cell(key, line[key], mark if key == "tuned_lr" else "") for key, _, _ in COLUMNS
        )
        workload = html.escape(line["workload"], quote=True)
        lines.append(
            f'<tr data-workload="{workload}" data-method="{slug(line["method"])}"'
            f"{_ours(line['method'])}>{cells}</tr>"
        )
    body = "\n".join(lines)
    return f'<table id="results"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(key: str, value: str | float, mark: str) -> str:
    if isinstance(value, str):
        return f'<td class="text">{html.escape(value)}</td>'
    if np.isnan(value):
        return '<td data-value="">&ndash;</td>'
    raw = "Infinity" if np.isinf(value) else f"{value:.10g}"
    shown = show(100 * value) if key == "lost" else show(value)
    if np.isinf(value) and key in ("time", "ratio"):
        shown = "not reached" if key == "time" else "∞"
    return f'<td data-value="{raw}">{shown}{mark}</td>'


def show(value: float) -> str:
    """Three digits, as a reader would write them."""
    if np.isinf(value):
        return "diverged"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
