"""What the rows say, in words: what was run, who wins, ties and loses, what a default costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals, markdown, scores
from stormplus_bench.finals import ONE_LR, any_left_out
from stormplus_bench.methods import COMPARED, HEADLINE, OURS, TIERS, ordered
from stormplus_bench.profiles import Profile, performance_profile

SECTION = "results"  # everything, for the site's page
MAP = "<!-- map of costs -->"  # the site colours the table that follows
TABLE = "table"  # the methods that people use side by side, for README
UNSEEN = (
    "On unseen data, everything at its default: validation accuracy at the end, or the loss where "
    "there is none, median over seeds."
)
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
class Facts:
    """What was run, on what, and what limits the findings.

    Attributes:
        measured: For each workload the number of examples its losses are measured on, as text;
            a workload whose rows do not tell is left out.
        tuned: Number of cases (a method on a workload) with several rates, and a best one.
        at_end: Number of those whose best rate is the lowest or the highest that was run.
    """

    runs: int
    diverged: int
    seeds: list[int]
    workloads: list[str]
    methods: list[str]
    budgets: dict[str, int]
    batch_sizes: dict[str, int]
    machines: list[str]
    versions: dict[str, str]
    measured: dict[str, str]
    tuned: int
    at_end: int

    def sentence(self) -> str:
        """What was run, and where."""
        where = " and ".join(self.machines) or "an unnamed machine"
        return (
            f"{many(self.runs, 'run')} of {many(len(self.methods), 'method')} on "
            f"{many(len(self.workloads), 'workload')}, {many(len(self.seeds), 'seed')}, on "
            f"{where}; {many(self.diverged, 'run')} diverged."
        )

    def rates(self) -> str:
        """How often the best rate is at an end of the range; "" if nothing was tuned."""
        if not self.tuned:
            return ""
        end = ": a wider one might do better." if self.at_end else "."
        return (
            f"In {self.at_end:,} of {many(self.tuned, 'case')} (a method on a workload) the best "
            f"rate is at an end of the range{end}"
        )

    def examples(self) -> str:
        """On how many examples the losses are measured; "" if the rows do not tell."""
        return ", ".join(f"{name} {number}" for name, number in self.measured.items())


def facts(frame: pd.DataFrame) -> Facts:
    """The facts of the rows; if a package occurs in several versions, all of them are named."""
    runs = finals.per_run(frame)
    versions: dict[str, set[str]] = {}
    for text in runs["versions"].unique():
        for name, version in json.loads(text).items():
            versions.setdefault(name, set()).add(str(version))
    by_workload = runs.groupby("workload", sort=True)
    measured = {name: sorted(part.dropna().unique()) for name, part in by_workload["measured"]}
    best = finals.at(frame, best_lr=True)
    return Facts(
        runs=len(runs),
        diverged=int(np.isinf(runs["loss"]).sum()),
        seeds=sorted(int(seed) for seed in runs["seed"].unique()),
        workloads=sorted(runs["workload"].unique()),
        methods=ordered(runs["method"]),
        budgets={name: int(value) for name, value in by_workload["budget"].max().items()},
        batch_sizes={name: int(value) for name, value in by_workload["batch_size"].max().items()},
        machines=sorted(name for name in runs["machine"].unique() if name),
        versions={name: ", ".join(sorted(found)) for name, found in sorted(versions.items())},
        measured={
            name: " or ".join(f"{int(number):,}" for number in numbers)
            for name, numbers in measured.items()
            if numbers
        },
        tuned=int(np.isfinite(best["loss"]).sum()),
        at_end=int(best["at_end"].sum()),
    )


def many(number: int, noun: str) -> str:
    """The number with its noun, as in: 1 run, 2,000 runs."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class Findings:
    """All that the page and README say of the rows; the tables' cells are texts.

    Attributes:
        facts: What was run.
        sentences: For each of the library's methods, with Markdown's bold.
        duels: Wins, ties and losses of the library's methods.
        scores: A line for each method.
        ceiling: The highest profile score that is possible, if that is not 1; else "".
        costs: The map of the cost of not tuning, methods by workloads, in per cent.
        compared: A line for each method of README's table, or none if the rows have none.
        unseen: Those methods on the networks' validation sets; no line if the rows have none.
        glance: What `Untuned` loses on networks, and what those methods do; "" without runs of it.
    """

    facts: Facts
    sentences: dict[str, list[str]]
    duels: pd.DataFrame
    scores: pd.DataFrame
    ceiling: str
    costs: pd.DataFrame
    compared: pd.DataFrame
    unseen: pd.DataFrame
    glance: str

    def plain(self) -> list[str]:
        """All sentences, without Markdown's bold."""
        return [text.replace("**", "") for texts in self.sentences.values() for text in texts]


def findings(frame: pd.DataFrame) -> Findings:
    """What the rows say."""
    ends = finals.ends_only(frame)  # enough for final losses, and much less to sort
    profile = performance_profile(frame)
    table = score_table(frame, profile)
    cost = scores.cost_of_not_tuning(ends)
    return Findings(
        facts(ends),
        sentences(ends),
        duel_table(ends),
        table,
        ceiling(profile),
        scores.cost_map(cost)[1],
        compared(cost),
        unseen(ends),
        at_a_glance(cost),
    )


def ours_in(frame: pd.DataFrame) -> list[str]:
    """The library's own methods that have a run at their default."""
    return [name for name in OURS if name in set(frame[frame["default"]]["method"])]


def sentences(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Three sentences on each of the library's methods, as far as the rows allow.

    How it compares with the best other method when all use their defaults, the same when all use
    their best lr, and how much its default loses.
    """
    cost = scores.mean_lost(scores.cost_of_not_tuning(frame))
    left_out = f" ({ONE_LR})" if any_left_out(frame) else ""
    found: dict[str, list[str]] = {}
    for method in ours_in(frame):
        texts = found.setdefault(method, [])
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
    return found


def _cost(method: str, cost: pd.DataFrame) -> str:
    mean, place, note = cost.loc[method, ["mean", "place", "note"]]
    text = f"**{method}** at its default leaves {scores.per_cent(mean)} % of the possible decrease "
    text += "on the table "
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

    A method has two columns: at the default lr and at the best lr, if it has several.
    """
    columns = {}
    for method in ours_in(frame):
        for best_lr, name in ((False, "default"), (True, "best lr")):
            counts = scores.count(scores.wins_ties_losses(frame, method, best_lr=best_lr))
            found = {
                rival: " / ".join(map(str, numbers))
                for rival, numbers in zip(counts.index, counts.to_numpy())
                if rival not in OURS
            }
            if found:
                columns[f"{method}, {name}"] = found
    table = pd.DataFrame(columns, dtype="str").fillna("")
    return table.reindex(ordered(table.index))


def score_table(frame: pd.DataFrame, at_default: Profile | None = None) -> pd.DataFrame:
    """For each method: its place and mean cost of not tuning in per cent, and profile scores."""
    cost = scores.mean_lost(scores.cost_of_not_tuning(frame))

    def texts(profile: Profile) -> pd.Series:
        items = profile.scores.items()
        found = {name: f"{score:.2f}{cost['note'].get(name, '')}" for name, score in items}
        return pd.Series(found, dtype=object)

    table = pd.DataFrame(
        {
            "place": cost["place"].dropna().map("{:.0f}".format),
            "cost of not tuning, %": cost["mean"].map(scores.per_cent) + cost["note"],
            "profile score, default": texts(at_default or performance_profile(frame)),
            "profile score, best lr": texts(performance_profile(frame, best_lr=True)),
        }
    )
    order = [*cost.index, *(name for name in table.index if name not in cost.index)]
    return table.reindex(order).astype(object).fillna("")  # a column may have no text at all


def ceiling(profile: Profile) -> str:
    """The highest profile score that is possible at the defaults, if it is not 1; else ""."""
    reached = np.isfinite(profile.times).any()
    missed = list(reached.index[~reached])
    if not missed:
        return ""
    return (
        f"At the default lr no method reaches the target of {', '.join(missed)}: no profile score "
        f"there can be above {reached.mean():.2f}."
    )


def compared(cost: pd.DataFrame) -> pd.DataFrame:
    """What people use, side by side: what a step takes, and what is lost without tuning."""
    columns = ["gradients a step", "buffers", "to choose"]
    known = {name: cells for name, cells in COMPARED.items() if name in set(cost["method"])}
    table = pd.DataFrame.from_dict(known, orient="index", columns=columns, dtype="str")
    for tier in ("networks", "smooth"):
        some = scores.mean_lost(cost[cost["workload"].isin(TIERS[tier])])
        told = {
            name: scores.per_cent(mean) + note
            for name, mean, note in zip(some.index, some["mean"], some["note"])
        }
        title = "networks" if tier == "networks" else "smooth problems"
        table[f"lost untuned, {title}, %"] = [told.get(name, "") for name in table.index]
    return table


def unseen(frame: pd.DataFrame) -> pd.DataFrame:
    """The same methods on the networks' validation sets: accuracy, or the loss where there is none.

    Medians over seeds at the default lr, where the training loss is judged.
    """
    ends = finals.defaults(frame)
    ends = ends[ends["workload"].isin(TIERS["networks"]) & ends["method"].isin(COMPARED)]
    accuracy = ends["valid_accuracy"].map(lambda share: f"{share:.1%}".replace("%", " %"))
    loss = ends["valid_loss"].map("loss {:.3g}".format)
    cells = accuracy.where(ends["valid_accuracy"].notna(), loss).where(ends["valid_loss"].notna())
    table = ends.assign(cell=cells).pivot(index="method", columns="workload", values="cell")
    return table.reindex([name for name in COMPARED if name in table.index]).fillna("")


def at_a_glance(cost: pd.DataFrame) -> str:
    """What `Untuned` loses on networks at its default, the best of what people use, and Adam."""
    some = scores.mean_lost(cost[cost["workload"].isin(TIERS["networks"])])
    ranked = some["mean"][some["place"].notna()]
    others = [name for name in ranked.index if name in COMPARED and name not in OURS]
    if "Untuned" not in ranked or not others:
        return ""
    told = [others[0], *(name for name in others[1:] if name == "Adam")]
    rest = ", ".join(f"{name} {scores.per_cent(ranked[name])} %" for name in told)
    return (
        f"With nothing tuned, `Untuned` leaves {scores.per_cent(ranked['Untuned'])} % of the "
        f"possible decrease of the loss on the table on the networks; {rest}."
    )


def readme_table(found: Findings, times: Mapping[str, float]) -> str:
    """README's table.

    Args:
        found: From the rows.
        times: For each method the time of a step over that of Adam(fused=True); may be empty.
    """
    table = found.compared.copy()
    if times:
        table["step time / Adam(fused)"] = [
            f"{times[name]:.2g}" if name in times else "" for name in table.index
        ]
    words = f"{found.glance} {markdown.escaped(found.facts.sentence())}".strip()
    return f"{markdown.table(table, 'method')}\n\n{markdown.wrap(words)}"


def results_section(found: Findings, figures: str, command: str) -> str:
    """The site's section on the results: the facts, and the best known of the library's methods.

    Args:
        found: From the rows.
        figures: The folder of the figures, as the page's links should have it.
        command: What regenerates the section.
    """
    ours = [name for name in found.sentences if name in HEADLINE] or list(found.sentences)
    texts = [markdown.escaped(text) for name in ours for text in found.sentences[name]]
    columns = [name for name in found.duels.columns if name.rsplit(", ", 1)[0] in ours]
    examples = found.facts.examples()
    limits = [found.facts.rates()]
    limits += [f"Examples that the losses are measured on: {examples}."] if examples else []
    about = markdown.escaped(found.facts.sentence())
    parts = [
        markdown.wrap(f"{about} Regenerated by `{command}`."),
        *(markdown.wrap(markdown.escaped(text)) for text in limits if text),
        f"![Cost of not tuning, a map of methods by workloads]({figures}/cost_of_not_tuning.png)",
        "The same as a table, in per cent of the possible decrease:",
        f"{MAP}\n\n{markdown.table(found.costs, 'method')}",
        *(["\n".join(markdown.wrap(f"- {text}", indent="  ") for text in texts)] if texts else []),
        "Wins / ties / losses over the workloads:",
        markdown.table(found.duels[columns], "against"),
        "All methods, the least costly first:",
        markdown.table(found.scores, "method"),
        *([markdown.wrap(markdown.escaped(found.ceiling))] if found.ceiling else []),
        *(
            [f"{markdown.wrap(UNSEEN)}\n\n{markdown.table(found.unseen, 'method')}"]
            if len(found.unseen)
            else []
        ),
        markdown.wrap(RULES),
    ]
    return "\n\n".join(parts)
