"""The report's tables, as Markdown, HTML, LaTeX and JSON, and the pages that show them."""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from stormplus_bench import finals, scores
from stormplus_bench.methods import COMPARED, NO_RATE, TIERS, headline, ordered
from stormplus_bench.profiles import performance_profile


def number(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits; empty for nan."""
    if np.isnan(value):
        return ""
    if np.isinf(value):
        return "diverged"
    return f"{value:,.0f}" if 10**digits <= 10 * abs(value) < 1e7 else f"{value:.{digits}g}"


def percent(value: float) -> str:
    """A gap in per cent, short enough for a cell; empty for nan."""
    if np.isnan(value):
        return ""
    if np.isinf(value):
        return "div."
    if value > 999:
        return ">999"
    if 0 < value < 0.095:
        return "<0.1"
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:.0f}"


def fixed(decimals: int) -> Callable[[float], str]:
    """Return a format with this number of decimals; empty for nan."""
    return lambda value: "" if np.isnan(value) else f"{value:.{decimals}f}"


@dataclass(frozen=True)
class Table:
    """A table of the report; `name` is that of the block that it fills in a page.

    The frame has numbers and texts; its index is the first column, and columns without a value are
    left out. `formats` says by column how to write numbers; otherwise `number` does.
    """

    name: str
    caption: str
    frame: pd.DataFrame
    formats: Mapping[str, Callable[[float], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frame", self.frame.dropna(axis="columns", how="all"))

    def text(self) -> pd.DataFrame:
        """Return the frame with every cell as text."""
        columns = {
            name: [v if isinstance(v, str) else self.formats.get(name, number)(v) for v in values]
            for name, values in self.frame.items()
        }
        return pd.DataFrame(columns, self.frame.index, dtype="str")

    def markdown(self) -> str:
        """Return the table in Markdown. Names are escaped; cells may hold Markdown."""
        cells = self.text()
        names = [escape_markdown(str(name)) for name in (cells.index.name, *cells.columns)]
        lines = [names]
        for name, line in zip(cells.index, cells.to_numpy()):
            lines.append([escape_markdown(name), *(html.escape(v, quote=False) for v in line)])
        head, *body = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([head, f"|{'---|' * len(names)}", *body])

    def html(self) -> str:
        """Return the table in HTML, below its caption."""
        body = self.text().reset_index().to_html(border=0, index=False)
        return f"<p>{html.escape(self.caption)}</p>\n<div class='scroll'>{body}</div>"

    def latex(self) -> str:
        """Return the table in LaTeX, for the packages `booktabs` and `longtable`."""
        cells = self.text().reset_index()
        options = {"caption": self.caption.replace("%", r"\%"), "label": f"tab:{self.name}"}
        return str(cells.to_latex(escape=True, index=False, **options))


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows literally, within one cell of a table."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]!|~$])", r"\\\1", text)


def printed(tables: Sequence[Table], style: str | None = None) -> str:
    """Return the tables as text, in LaTeX, or as JSON: by name, lists of unformatted numbers."""
    if style == "latex":
        return "\n".join(table.latex() for table in tables)
    if style != "json":
        return "\n\n".join(table.text().to_string() for table in tables)
    found = {t.name: json.loads(t.frame.reset_index().to_json(orient="records")) for t in tables}
    return json.dumps(found, indent=1, ensure_ascii=False)


def fill(page: str, blocks: Mapping[str, str], file: str) -> str:
    """Return the page with these texts between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

    A page may have any of the blocks; other blocks are left alone.

    Raises:
        ValueError: The page has none of the blocks, or a marker without its pair.
    """
    known = 0
    for name, text in blocks.items():
        begin, end = (f"<!-- {name}:{edge} -->" for edge in ("begin", "end"))
        before, *rest = re.split(f"({begin}|{end})", page)
        if rest and rest[::2] != [begin, end]:
            raise ValueError(f"{file} should have the lines {begin} and {end} once, in this order")
        if rest:
            known, page = known + 1, f"{before}{begin}\n\n{text}\n\n{end}{rest[-1]}"
    if not known:
        raise ValueError(f"{file} has no marker <!-- NAME:begin --> of {', '.join(blocks)}")
    return page


def all_tables(frame: pd.DataFrame, step_times: Mapping[str, float]) -> list[Table]:
    """Return the report's tables that have a value; `step_times` are those of `readme_table`."""
    found = [
        readme_table(frame, step_times),
        gap_table(frame),
        scores_table(frame),
        validation_table(_validated(frame)),
        results_table(frame),
    ]
    return [table for table in found if not table.frame.empty]


def _validated(frame: pd.DataFrame) -> pd.DataFrame:
    """Return finals at defaults: on networks, of README's methods and the reader's; or else all."""
    ends = finals.defaults(frame)
    shown = ends["method"].isin(headline(ends["method"])) & ends["workload"].isin(TIERS["networks"])
    return ends[shown] if shown.any() else ends


def readme_table(frame: pd.DataFrame, step_times: Mapping[str, float]) -> Table:
    """Return the methods that people choose from, one line each, for README.

    The table is empty without a workload of README. `step_times` are times per step over that of
    Adam(fused=True), by method; they may be empty.
    """
    gaps, ends = scores.gap(frame), finals.defaults(frame)
    on_page = ends["workload"].isin([*TIERS["networks"], *TIERS["smooth"]])
    known = [name for name in COMPARED if name in set(ends["method"][on_page])]
    table = pd.DataFrame.from_dict(
        {name: COMPARED[name] for name in known},
        orient="index",
        columns=["gradients per step", "buffers", "to choose"],
    ).rename_axis("method")
    formats: dict[str, Callable[[float], str]] = {}
    for tier, title in (("networks", "networks"), ("smooth", "smooth problems")):
        column = f"gap at defaults, {title}, %"
        mean = scores.mean_gap(gaps[gaps["workload"].isin(TIERS[tier])])["mean"]
        table[column], formats[column] = 100 * mean.reindex(known), percent
    column = "validation accuracy, networks, %"
    table[column], formats[column] = mean_accuracy(ends).reindex(known), fixed(1)
    if step_times:
        table["step time / Adam(fused)"] = pd.Series(step_times, dtype=float).reindex(known)
        formats["step time / Adam(fused)"] = lambda value: number(value, 2)
    caption = (
        "Gap at defaults (lower is better): the share of the achievable loss reduction that is "
        "missed without tuning, (loss - best) / (initial - best), mean over workloads, each at "
        "most 100 %. Validation accuracy at the end, at defaults, mean over the networks that "
        "have one. Buffers: of the model's size. Step time: the optimizer alone, on a CPU."
    )
    return Table("table", caption, table, formats)


def mean_accuracy(ends: pd.DataFrame) -> pd.Series:
    """Return mean validation accuracies in %, of methods that have one on every network."""
    networks = ends[ends["workload"].isin(TIERS["networks"])]
    return validation_table(networks).frame.filter(like=", %").mean(axis=1, skipna=False)


def tuned_tables(frame: pd.DataFrame) -> list[Table]:
    """Return gaps and validation results, each method at the lr with the lowest training loss."""
    ends = finals.tuned(frame)
    gaps, validation = gap_table(frame, ends), validation_table(ends)
    caption = gaps.caption.replace("at defaults", "at the best lr").replace(" without tuning", "")
    return [
        replace(gaps, name="tuned", caption=caption),
        replace(validation, name="tuned-validation"),
    ]


def gap_table(frame: pd.DataFrame, ends: pd.DataFrame | None = None) -> Table:
    """Return the gap at defaults, methods by workloads, and the mean validation accuracy.

    `ends` replaces the defaults by other lines of `finals.per_rate`.
    """
    ends = finals.defaults(frame) if ends is None else ends
    grid = scores.gap_map(scores.gap(frame, ends))
    formats: dict[str, Callable[[float], str]] = dict.fromkeys(grid.columns, percent)
    accuracy = mean_accuracy(ends).reindex(grid.index)
    if accuracy.notna().any():
        grid["accuracy"], formats["accuracy"] = accuracy, fixed(1)
    caption = (
        "Gap at defaults, % (lower is better): the share of the achievable loss reduction that is "
        "missed without tuning, (loss - best) / (initial - best), best being the lowest final "
        "training loss of any method at any lr. Mean: each workload counts for at most 100 %. "
        "div.: diverged in half of the runs or more. Empty: not run. Accuracy: in validation, %, "
        "mean over the networks that have one."
    )
    return Table("gap", caption, grid, formats)


def scores_table(frame: pd.DataFrame) -> Table:
    """Return rank, mean gap and profile scores per method."""
    mean = scores.mean_gap(scores.gap(frame))
    table = pd.DataFrame(
        {
            "rank": mean["rank"],
            "gap at defaults, %": 100 * mean["mean"],
            "workloads": mean["workloads"],
            "profile score": performance_profile(frame).scores,
        }
    ).reindex(mean.index)
    formats = {"gap at defaults, %": percent, "profile score": fixed(2)}
    caption = (
        "Rank by the gap at defaults, among methods that ran on every workload; the gap's mean; "
        "the number of workloads; the profile score (higher is better, at most 1): the area under "
        "the performance profile from 1 to 4, a workload without a run being a missed target."
    )
    return Table("scores", caption, table, formats)


def losses_table(frame: pd.DataFrame) -> Table:
    """Return final training losses, one line per workload and method."""
    keys = ["workload", "method"]
    best = finals.tuned(frame).set_index(keys)
    table = pd.DataFrame(
        {
            "default": finals.defaults(frame).set_index(keys)["loss"].reindex(best.index),
            "best": best["loss"],
            "lr of best": best["lr"].drop(index=list(NO_RATE), level="method", errors="ignore"),
            "validation loss": best["valid_loss"],
            "validation accuracy": best["valid_accuracy"],
        }
    )
    table = table.reindex(ordered(frame["method"]), level="method").sort_index(
        level="workload", sort_remaining=False
    )
    caption = (
        "Final training loss at the default and at the best lr, and validation at the best lr, "
        "medians over seeds."
    )
    return Table("losses", caption, table, dict.fromkeys(table, lambda value: number(value, 4)))


def validation_table(ends: pd.DataFrame) -> Table:
    """Return validation accuracies, or losses where there are none, from lines of `finals`."""
    columns, formats = {}, {}
    for workload, part in ends.set_index("method").groupby("workload"):
        if part["valid_accuracy"].notna().any():
            columns[f"{workload}, %"] = 100 * part["valid_accuracy"]
            formats[f"{workload}, %"] = fixed(1)
        else:
            columns[f"{workload}, loss"] = part["valid_loss"]
    table = pd.DataFrame(columns, index=pd.Index(ordered(ends["method"]), name="method"))
    caption = (
        "Validation accuracy in %, or validation loss where there is no accuracy, at the end of "
        "training, median over seeds."
    )
    return Table("validation", caption, table, formats)


def results_table(frame: pd.DataFrame) -> Table:
    """Return all scores, one line per workload and method."""
    caption = (
        "At the default lr: final training loss (median, low and high over seeds), gap in %, "
        "evaluations to the target of the performance profile, gradient norm, validation results, "
        "seconds per run, optimizer state in MB. tuned_: at the best of the lr that were run, lrs "
        "their number, at_end if it is the lowest or the highest. runs, diverged: at all lr."
    )
    formats: dict[str, Callable[[float], str]] = {
        "gap": percent,
        "at_end": lambda value: "yes" if value else "",
        "time": lambda value: "missed" if np.isinf(value) else number(value),
    }
    return Table("results", caption, scores.results(frame).set_index("workload"), formats)
