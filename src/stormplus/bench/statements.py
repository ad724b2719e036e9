"""What the rows say, in words: the facts of the benchmark, wins, ties and losses."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus.bench import scores
from stormplus.bench.drawing import HEADLINE
from stormplus.bench.facts import Facts, facts, many
from stormplus.bench.figures import per_cent
from stormplus.bench.finals import ONE_LR, any_left_out, ends_only
from stormplus.bench.style import OURS, ordered


def markers(name: str) -> tuple[str, str]:
    """The lines that a section which a command writes stands between."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


BEGIN, END = markers("results")
RULES = (
    "Final training loss after equal numbers of gradient evaluations, median over seeds. A win "
    "needs every seed to end below every seed of the rival, and a difference of more than "
    f"{scores.TOLERANCE:.0%} of the possible decrease (from the initial loss to the best loss of "
    "any method at any lr); what is neither a win nor a loss is a tie. Divergence in half of the "
    "runs or more loses against a method that does not diverge. The best lr of a method is "
    "chosen on the seeds that are reported. Where methods are compared at their best lr, those "
    "that ran one learning rate on a workload are left out there. In a profile score a workload "
    "without a run counts as a missed target."
)


@dataclass(frozen=True)
class Summary:
    """What the page and the README say; the tables' cells are texts."""

    facts: Facts
    said: dict[str, list[str]]  # for each of the library's methods
    duels: pd.DataFrame
    scores: pd.DataFrame
    ceiling: str  # what the scores have to be read against


def summary(frame: pd.DataFrame) -> Summary:
    """All of it."""
    ends = ends_only(frame)
    profile = scores.performance_profile(frame)
    table = score_table(frame, profile)
    return Summary(facts(ends), statements(ends), duel_table(ends), table, ceiling(profile))


def ours_in(frame: pd.DataFrame) -> list[str]:
    """The library's own methods that have a run at their default."""
    return [name for name in OURS if name in set(frame[frame["default"]]["method"])]


def statements(frame: pd.DataFrame) -> dict[str, list[str]]:
    """For each of the library's methods: at its default, tuned, and what its default costs."""
    cost = scores.mean_lost(scores.cost_of_not_tuning(frame))
    left_out = f" ({ONE_LR})" if any_left_out(frame) else ""
    said: dict[str, list[str]] = {}
    for method in ours_in(frame):
        texts = said.setdefault(method, [])
        for best_lr in (False, True):
            duels = scores.against_the_best(frame, method, best_lr=best_lr)
            if duels.empty:
                continue
            how = (
                f"with every method at its best lr{left_out}"
                if best_lr
                else "with every method at its default lr"
            )
            texts.append(f"**{method}**, {how}: {_against(duels)}")
        if not np.isnan(cost["mean"].get(method, np.nan)):
            texts.append(_cost(method, cost))
    return said


def _cost(method: str, cost: pd.DataFrame) -> str:
    mean, place, note = cost.loc[method, ["mean", "place", "note"]]
    text = f"**{method}** untuned leaves {per_cent(mean)} % of the possible decrease on the table "
    if np.isnan(place):
        return f"{text}on average{note}: without a place, which takes a run on every workload."
    ranked = cost["place"].notna()
    whole = "" if ranked.all() else " that ran on every workload"
    return f"{text}on average: place {int(place)} of {ranked.sum()}{whole}."


def _against(duels: pd.DataFrame) -> str:
    """Against the best rival of each workload."""
    words = {"win": "better than the best other method on", "tie": "level with it on"}
    words["loss"] = "worse than it on"
    parts = []
    for outcome, text in words.items():
        some = duels[duels["outcome"] == outcome]
        names = list(some["workload"])
        if outcome == "loss":
            names = [f"{name} (to {rival})" for name, rival in zip(names, some["rival"])]
        elif len(some) == len(duels):
            names = ["all of them"] if len(some) > 1 else names
        total = f" of {many(len(duels), 'workload')}" if outcome == "win" else ""
        parts.append(f"{text} {len(some)}{total}" + (f": {', '.join(names)}" if names else ""))
    return "; ".join(parts) + "."


def duel_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Wins, ties and losses of each of our methods against each other method, as text.

    Columns are (method, "default") and (method, "best lr").
    """
    columns = {}
    for method in ours_in(frame):
        for best_lr, name in ((False, "default"), (True, "best lr")):
            counts = scores.count(scores.wins_ties_losses(frame, method, best_lr=best_lr))
            columns[f"{method}, {name}"] = {
                rival: " / ".join(map(str, numbers))
                for rival, numbers in zip(counts.index, counts.to_numpy())
                if rival not in OURS
            }
    table = pd.DataFrame(columns, dtype="str").fillna("")
    return table.reindex(ordered(table.index))


def score_table(frame: pd.DataFrame, at_default: scores.Profile | None = None) -> pd.DataFrame:
    """For each method: its place and mean cost of not tuning in per cent, and profile scores."""
    cost = scores.mean_lost(scores.cost_of_not_tuning(frame))

    def told(profile: scores.Profile) -> pd.Series:
        items = profile.scores.items()
        texts = {name: f"{score:.2f}{cost['note'].get(name, '')}" for name, score in items}
        return pd.Series(texts, dtype=object)

    table = pd.DataFrame(
        {
            "place": cost["place"].dropna().map("{:.0f}".format),
            "cost of not tuning, %": cost["mean"].map(per_cent) + cost["note"],
            "profile score, default": told(at_default or scores.performance_profile(frame)),
            "profile score, best lr": told(scores.performance_profile(frame, best_lr=True)),
        }
    )
    order = [*cost.index, *(name for name in table.index if name not in cost.index)]
    return table.reindex(order).astype(object).fillna("")  # a column may have no text at all


def ceiling(profile: scores.Profile) -> str:
    """The highest profile score that is possible at the defaults, if it is not 1; else ""."""
    reached = np.isfinite(profile.times).any()
    missed = list(reached.index[~reached])
    if not missed:
        return ""
    return (
        f"At the default lr no method reaches the target of {', '.join(missed)}: no profile score "
        f"there can be above {reached.mean():.2f}."
    )


def markdown_section(summary: Summary, pictures: str, command: str) -> str:
    """The section of the README, markers included: the best known of the library's methods.

    Args:
        summary: Of the rows.
        pictures: The folder of the pictures, as the README's links should have it.
        command: What regenerates the section.
    """
    ours = [name for name in summary.said if name in HEADLINE] or list(summary.said)
    texts = [text for name in ours for text in summary.said[name]]
    columns = [name for name in summary.duels.columns if name.rsplit(", ", 1)[0] in ours]
    blocks = [
        BEGIN,
        _wrap(summary.facts.sentence() + f" Regenerated by `{command}`."),
        *(_wrap(text) for text in _limits(summary.facts) if text),
        f"![Cost of not tuning, a map of methods by workloads]({pictures}/cost_of_not_tuning.png)",
        *(_wrap(f"- {text}", indent="  ") for text in texts),
        "Wins / ties / losses over the workloads:",
        markdown_table(summary.duels[columns], "against"),
        "All methods, the least costly first:",
        markdown_table(summary.scores, "method"),
        *([_wrap(summary.ceiling)] if summary.ceiling else []),
        f"![Final loss against the learning rate]({pictures}/sensitivity.png)",
        _wrap(RULES),
        END,
    ]
    text = "\n\n".join(blocks) + "\n"
    return text.replace("\n\n- ", "\n- ").replace("png)\n- ", "png)\n\n- ")


def _limits(facts: Facts) -> tuple[str, str]:
    measured = facts.examples()
    return facts.rates(), measured and f"Examples that the losses are measured on: {measured}."


def markdown_table(table: pd.DataFrame, corner: str) -> str:
    """A frame of texts as a Markdown table."""
    lines = [[corner, *table.columns], ["---"] * (1 + len(table.columns))]
    lines += [[str(name), *line] for name, line in zip(table.index, table.to_numpy())]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def marked(block: str, marker: str) -> str:
    """A section: the block between its markers."""
    begin, end = markers(marker)
    return f"{begin}\n\n{block.strip()}\n\n{end}"


def replace_section(text: str, section: str, name: str, marker: str = "results") -> str:
    """Put the section, markers included, in the place of the old one.

    Raises:
        ValueError: The text does not have each marker once, in order.
    """
    begin, end = markers(marker)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"{name} should have the lines {begin} and {end} once each, in this order: the "
            "results are written between them"
        )
    before, rest = text.split(begin)
    return before + section.rstrip("\n") + rest.split(end)[1]


def _wrap(text: str, indent: str = "") -> str:
    return "\n".join(
        textwrap.wrap(
            text, 96, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    )


def plain(said: Mapping[str, list[str]]) -> list[str]:
    """All statements, without Markdown's bold."""
    return [text.replace("**", "") for texts in said.values() for text in texts]
