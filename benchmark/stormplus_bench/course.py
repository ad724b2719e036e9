"""The paper's experiment to its end, on few images: what is run next, and the page that it gives.

Every method sees as many epochs as the others. It starts from the best rate of the sweep, which
saw the first epochs only, and from there half a decade at a time, until the rate with the lowest
training loss at the end lies between two others; then this one with a second seed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.figure import Figure

from stormplus.files import write_whole
from stormplus_bench import finals, markdown, paper_panels, paper_tables, rows
from stormplus_bench.claims import AXES, NOT_RUN, Reading, Standings, Verdict, verdicts
from stormplus_bench.methods import NO_RATE, ordered

# By method: benchopt's name and options, and the first rate. Where there is a sweep it is the best
# one of it; the others are what moves the parameters about as far as STORM+ mean and SGD do.
METHODS: dict[str, tuple[str, dict[str, list[str]], float]] = {
    "SGD momentum": ("sgd-momentum", {}, 0.00316),
    "STORM+ mean": ("storm-plus", {"norm": ["mean"]}, 0.00316),
    "Adam": ("adam", {}, 0.0001),
    "STORM+": ("storm-plus", {"norm": ["raw"]}, 0.316),
    "AdaGrad": ("adagrad", {}, 0.001),
    "STORM mean": ("storm", {"norm": ["mean"]}, 0.1),
    "STORM": ("storm", {"norm": ["raw"]}, 0.0316),
    "simplified STORM+ mean": ("simplified-storm-plus", {"norm": ["mean"]}, 0.01),
    "simplified STORM+": ("simplified-storm-plus", {"norm": ["raw"]}, 0.316),
    "Untuned": ("untuned", {}, 1.0),
}
RATES = 6  # of a method, at most
SEEDS = (0, 1)
FORMS = {"STORM+ mean": "with the authors' recipe", "STORM+": "with the norm as printed"}
READINGS = [Reading(ours, ours.replace("+", ""), axis) for ours in FORMS for axis in AXES]
PLAIN = 0.9  # from this gain on d is the last gradient, and not a mean of many
BY_HEART = 0.99  # training accuracy
SHOWN = (0.01, 0.1, 0.5, 1)  # of the epochs, in the estimator's table


@dataclass(frozen=True)
class Course:
    """How many images, and how often they are seen."""

    images: int
    epochs: int

    @property
    def name(self) -> str:
        """As the benchmark's `paper` data set calls itself."""
        return f"resnet34-cifar10 ({self.images} images, {self.epochs} epochs)"


COURSES = {
    "course": Course(1000, 100),  # two cores: a night
    "course-smoke": Course(200, 2),  # does it run at all?
}


def stage(
    course: Course, frame: pd.DataFrame, methods: Collection[str]
) -> tuple[str, dict[str, Any]] | None:
    """What to run next, with a title and as benchopt's configuration; None at the end.

    Raises:
        ValueError: A method is not one of `METHODS`.
    """
    if unknown := sorted(set(methods) - set(METHODS)):
        raise ValueError(f"unknown method {unknown[0]!r}: choose from {', '.join(METHODS)}")
    wanted = [method for method in METHODS if method in methods]  # in the order of the table
    first, beside, again = missing(course, frame, wanted)
    if first:
        return "the first rate of each method", _config(course, first, SEEDS[0])
    if beside:
        return "the rates beside the best ones", _config(course, beside, SEEDS[0])
    for seed, rates in again.items():
        return f"the best rates, seed {seed}", _config(course, rates, seed)
    return None


Rates = dict[str, list[float]]  # by method


def missing(
    course: Course, frame: pd.DataFrame, methods: Collection[str] = tuple(METHODS)
) -> tuple[Rates, Rates, dict[int, Rates]]:
    """What is still to be run: the first rates, those beside the best ones, further seeds.

    A method waits for the second until it has the first, and for the third until it has the second.
    """
    frame = frame[frame["workload"] == course.name]
    runs = set(zip(frame["method"], frame["lr"], frame["seed"]))
    best = best_rates(frame)
    first, beside = {}, {}
    again: dict[int, Rates] = {}
    for m in methods:
        start = METHODS[m][2]
        tried = {lr for method, lr, seed in runs if method == m and seed == SEEDS[0]}
        if start not in tried:
            first[m] = [start]
            continue
        neighbours = {neighbour(best[m], step) for step in (-1, 1)} - tried
        if neighbours and len(tried) < RATES and m not in NO_RATE:
            beside[m] = sorted(neighbours)
            continue
        for seed in SEEDS[1:]:
            if (m, best[m], seed) not in runs:
                again.setdefault(seed, {})[m] = [best[m]]
    return first, beside, again


def best_rates(frame: pd.DataFrame) -> dict[str, float]:
    """The rate with the lowest training loss at the end, of the first seed, by method."""
    first = frame[frame["seed"] == SEEDS[0]]
    if first.empty:
        return {}
    found: dict[str, float] = finals.tuned(first).set_index("method")["lr"].to_dict()
    return found


def neighbour(lr: float, step: int) -> float:
    """The next of ..., 0.0001, 0.000316, 0.001, ...: half a decade, three digits."""
    exponent = (round(2 * math.log10(lr)) + step) / 2
    return float(f"{10**exponent:.3g}")


def _config(course: Course, rates: dict[str, list[float]], seed: int) -> dict[str, Any]:
    return {
        "objective": [{"Training loss": {"seed": [seed]}}],
        "dataset": [{"paper": {"images": [course.images], "epochs": [course.epochs]}}],
        "solver": [
            {METHODS[method][0]: {"lr": lrs, **METHODS[method][1]}} for method, lrs in rates.items()
        ],
    }


@dataclass(frozen=True)
class Report:
    """The paragraph that begins the page, the course's own section, and what the figures show."""

    summary: str
    text: str
    chosen: pd.DataFrame  # the runs at the best rates
    estimators: dict[str, pd.DataFrame]

    def figures(self) -> dict[str, Figure]:
        """By name."""
        return {
            "course": paper_panels.curves(self.chosen),
            "estimator": paper_panels.estimator(self.estimators, list(FORMS)),
        }


def report(found: list[dict[str, Any]], course: Course) -> Report:
    """What the rows tell, as far as they go.

    Raises:
        ValueError: There is no run of the course.
    """
    found = [row for row in found if row["workload"] == course.name]
    if not found:
        raise ValueError(f"there is no run of the course {course.name!r}")
    whole = paper_tables.with_epochs(rows.frame_of(found), course.images)
    best = best_rates(whole)
    chosen = whole[whole["lr"] == whole["method"].map(best)]
    tables = estimators(found, course, best)
    parts = [
        paper_tables.where(whole),
        *_unfinished(course, whole),
        *(paper_tables.standings(chosen, axis) for axis in AXES),
        "### The paper's claims at the end of the course\n",
        paper_tables.judged(chosen, READINGS),
    ]
    swept = whole[(whole["seed"] == SEEDS[0]) & ~whole["method"].isin(NO_RATE)]
    if len(swept):
        parts += ["### The rates\n", paper_tables.rates(swept)]
    if tables:
        parts += ["### Is the variance reduced?\n", _estimator_table(tables, course)]
    summary = _summary(whole, chosen, course, tables)
    return Report(summary, "\n".join(parts), chosen, tables)


def write(journal: Path, course: Course, folder: Path) -> list[Path]:
    """The figures and the text, from the journal."""
    try:
        made = report(rows.read(journal, on_cut="drop"), course)
    except ValueError as error:
        raise ValueError(f"{journal}: {error}") from error
    written = []
    for name, picture in made.figures().items():
        written.append(folder / f"{name}.png")
        paper_panels.save(picture, written[-1])
    text = f"{made.summary}\n\n{made.text}"
    return [*written, write_whole(folder / "course.md", text)]


def estimators(
    found: list[dict[str, Any]], course: Course, best: dict[str, float]
) -> dict[str, pd.DataFrame]:
    """By form of STORM+: gain, step size, norms and errors along the run at the best rate."""
    tables = {}
    for row in found:
        method = row["method"]
        mine = method in FORMS and row["lr"] == best.get(method) and row["seed"] == SEEDS[0]
        if mine and "estimator" in row:
            table = pd.DataFrame(row["estimator"], dtype="float64")
            samples = pd.Series(row["curve"]["samples"][: len(table)])
            table["epoch"] = samples * paper_tables.BATCH / course.images
            for name in ("full_grad", "error", "batch_error"):
                table[name] = paper_panels.root(table[f"{name}_sq"])
            table["full_grad_norm"] = table.pop("full_grad")
            table["ratio"] = table["error"] / table["batch_error"]
            tables[method] = table[table["epoch"] > 0]
    return {method: tables[method] for method in FORMS if method in tables}


def _estimator_table(tables: dict[str, pd.DataFrame], course: Course) -> str:
    lines = {}
    for method, table in tables.items():
        for share in SHOWN:
            at = table.iloc[(table["epoch"] - share * course.epochs).abs().argmin()]
            lines[f"{method}, epoch {at['epoch']:g}"] = {
                "gain": f"{at['gain']:.2g}",
                "step size": f"{at['step_size']:.2g}",
                **{
                    title: f"{at[name]:.3g}"
                    for name, title in (
                        ("grad_norm", r"$\vert g \vert$"),
                        ("estimator_norm", r"$\vert d \vert$"),
                        ("full_grad_norm", r"$\vert \nabla f \vert$"),
                        ("error", r"$\vert d - \nabla f \vert$"),
                        ("batch_error", r"mini-batch's $\vert g - \nabla f \vert$"),
                        ("ratio", "ratio"),
                    )
                },
            }
    table = markdown.table(pd.DataFrame.from_dict(lines, orient="index"), "where")
    sentences = " ".join(reduced(method, part) for method, part in tables.items())
    return f"{table}\n\n{markdown.wrap(sentences)}\n"


def reduced(method: str, table: pd.DataFrame) -> str:
    """Whether the estimator is better than the gradient of a mini-batch, in a sentence."""
    known = table[table["ratio"].notna()]
    if known.empty:
        return f"{method}: the estimator's error was not measured."
    ratio, gain = known["ratio"], known["gain"]
    errors = f"{ratio.min():.2g} to {ratio.max():.2g} times that of a mini-batch's gradient"
    if gain.min() > PLAIN:
        return (
            f"{method}: no, nothing is averaged. The gain is {gain.min():.3f} or more, so that d "
            "is the gradient of the last mini-batch; its error, "
            f"{errors}, is the luck of that draw."
        )
    gains = f"with gains of {gain.max():.2g} to {gain.min():.2g}"
    below = int((ratio < 1).sum())
    if not below:
        return f"{method}: no. {gains.capitalize()} the error of d is {errors}."
    where = "everywhere" if below == len(ratio) else f"at {below} of {len(ratio)} places"
    return (
        f"{method}: yes, {where}. {gains.capitalize()} the error of d is {errors}, at the end "
        f"{ratio.iloc[-1]:.2g} times."
    )


def _unfinished(course: Course, frame: pd.DataFrame) -> list[str]:
    """What is not there yet, in words; nothing if all is."""
    first, beside, again = missing(course, frame)
    seeds = {m: rates for found in again.values() for m, rates in found.items()}
    waiting = {
        "Not run yet": first,
        "The rates beside the best one, which may do better, are still to be run for": beside,
        "One seed only so far, so no error bars": seeds,
    }
    told = [f"{title}: {', '.join(ordered(part))}." for title, part in waiting.items() if part]
    if not told:
        return []
    return [markdown.wrap("**The course is not complete.** " + " ".join(told)) + "\n"]


def _summary(
    whole: pd.DataFrame, chosen: pd.DataFrame, course: Course, tables: dict[str, pd.DataFrame]
) -> str:
    """What a reader of the paper wants to know first: what was reproduced, and what was not."""
    parts = [
        f"ResNet34 was trained to the end on {course.images:,} images of CIFAR-10, "
        f"{course.epochs} epochs of every method (the paper: 50,000 images)."
    ]
    if _unfinished(course, whole):
        parts.append("Not every run of this course has been made yet: this is what there is.")
    judged = {}
    for ours, form in FORMS.items():
        reading = Reading(ours, ours.replace("+", ""), "epoch")
        judged[form] = verdicts(chosen, reading)
        if absent := ordered(set(reading.methods) - set(chosen["method"])):
            parts.append(
                f"STORM and STORM+ {form} cannot be judged before {', '.join(absent)} has run."
            )
    judged = {form: found for form, found in judged.items() if NOT_RUN not in found.values()}
    if judged:
        parts.append("Of the paper's seven claims, at equal epochs, the paper's axis:")
        parts.append("; ".join(_listed(judged)) + ".")
    parts += _reached(Standings(chosen, "epoch").values)
    if tables:
        parts.append("Is the variance reduced?")
    parts += [reduced(method, table) for method, table in tables.items()]
    return markdown.wrap(" ".join(parts))


def _reached(ends: dict[str, dict[str, float]]) -> list[str]:
    """Who has learned the images by heart, and who has not; test accuracies, the best first."""
    methods = sorted(ordered(ends), key=lambda method: -ends[method]["valid_accuracy"])
    parts: dict[bool, list[str]] = {True: [], False: []}
    for method in methods:
        end = ends[method]
        known = end["train_accuracy"] > BY_HEART
        training = "" if known else f", training accuracy {end['train_accuracy']:.2f}"
        parts[known].append(
            f"{method} {end['valid_accuracy']:.2f} ({end['valid_loss']:.1f}{training})"
        )
    titles = {
        True: "All images learned by heart, test accuracy (and test loss)",
        False: "Not learned by heart",
    }
    return [f"{titles[known]}: {', '.join(part)}." for known, part in parts.items() if part]


def _listed(judged: dict[str, dict[str, Verdict]]) -> list[str]:
    """The claims by what was found, and of those with two findings, by form; why, by the first."""
    titles = {"seen": "reproduced", "not seen": "not reproduced", "inconclusive": "inconclusive"}
    found: dict[str, list[str]] = {}
    for text in next(iter(judged.values())):
        given = {form: titles[verdict[text]] for form, verdict in judged.items()}
        if len(set(given.values())) == 1:
            title = next(iter(given.values()))
        else:
            title = ", ".join(f"{verdict} {form}" for form, verdict in given.items())
        why = next(iter(judged.values()))[text].why
        found.setdefault(title, []).append(f"“{text}”" + (f" ({why})" if why else ""))
    return [f"**{title}**: {', '.join(texts)}" for title, texts in found.items()]
