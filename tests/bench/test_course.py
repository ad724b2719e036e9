"""The course: what is run next, how it goes on, and what its page says."""

import itertools
import math
import os
from functools import partial
from io import StringIO
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from bench_rows import make_row, write_rows
from click.testing import CliRunner
from rich.console import Console
from small_network import small
from torch.optim import SGD

from stormplus.progress import Pulse
from stormplus.theory.palette import WIDTH
from stormplus_bench import course, engine, rows
from stormplus_bench.commands import paper as command
from stormplus_bench.course import COURSES, METHODS, neighbour, report, stage, write
from stormplus_bench.plan import Plan, Run
from stormplus_bench.train.catalogue import balanced
from stormplus_bench.train.estimator import QUANTITIES
from stormplus_bench.train.solver import TorchSolver
from stormplus_bench.train.steppers import OneGradient
from stormplus_bench.train.training import part_file, share_file

COURSE = COURSES["course"]
PLACES = [0, 10, 100, 500, 1000]
TUNED = [m for m in METHODS if m != "Untuned"]
PAIRED = [m for m in METHODS if "STORM" in m]


def course_row(method, lr=None, seed=0, loss=0.1, accuracy=0.9):
    """A run of the course that falls to this loss; STORM+ has its estimator watched."""
    losses = [2.5, 2.0, 1.0, 2 * loss, loss] if loss else [2.5, None]
    places = PLACES[: len(losses)]
    lr = METHODS[method][2] if lr is None else lr
    row = make_row(losses, workload=COURSE.name, method=method, lr=lr, seed=seed, default=False)
    accuracies = [0.1, 0.2, 0.5, accuracy, accuracy][: len(losses)]
    price = 2 if method in PAIRED else 1
    row["curve"] |= {"evaluations": [price * p for p in places], "samples": places}
    row["curve"] |= {"train_accuracy": accuracies, "valid_accuracy": [x / 2 for x in accuracies]}
    row["status"] = "done" if loss else "diverged"
    if method in ("STORM+", "STORM+ mean"):
        row["estimator"] = {name: [None, 1.0, 1.0, 1.0, 1.0] for name in QUANTITIES}
        row["estimator"]["error_sq"] = [None, 4.0, 1.0, 0.25, 0.0625]
        row["estimator"]["gain"] = [None, 0.1, 0.1, 0.1, 0.1]
    return row


def beside(method):
    return [neighbour(METHODS[method][2], step) for step in (-1, 1)]


def every():
    """The whole course: three rates of every method, and a second seed of the one between."""
    found = [course_row(m, seed=seed) for m in METHODS for seed in (0, 1)]
    return found + [course_row(m, lr, loss=0.2) for m in TUNED for lr in beside(m)]


def asked(found, methods=METHODS):
    """The next stage: its title, its seed, and (benchopt's solver, rates)."""
    following = stage(COURSE, rows.frame_of(rows.finite(found)), methods)
    if following is None:
        return None
    title, config = following
    assert config["dataset"] == [{"paper": {"images": [1000], "epochs": [100]}}]
    ((_, options),) = config["objective"][0].items()
    solvers = [(name, o["lr"]) for s in config["solver"] for name, o in s.items()]
    return title, options["seed"], solvers


def test_first_every_method_then_the_rates_beside_then_another_seed():
    title, seed, solvers = asked([])
    assert (title, seed, len(solvers)) == ("the first rate of each method", [0], len(METHODS))
    first = [course_row(m) for m in METHODS]
    title, seed, solvers = asked(first)
    assert (title, seed) == ("the rates beside the best ones", [0])
    assert ("adam", [0.0000316, 0.000316]) in solvers
    assert "untuned" not in dict(solvers)
    found = first + [course_row(m, lr, loss=0.2) for m in TUNED for lr in beside(m)]
    title, seed, solvers = asked(found)
    assert (title, seed) == ("the best rates, seed 1", [1])
    assert {("adam", (0.0001,)), ("untuned", (1.0,))} <= {(s, tuple(lr)) for s, lr in solvers}
    assert asked(every()) is None


def test_a_better_rate_beside_moves_on_and_not_for_ever():
    found = every()
    found.append(course_row("Adam", 0.000316, loss=0.05))
    assert asked(found)[2] == [("adam", [0.001])]
    found += [course_row("Adam", lr, loss=0.05 - lr) for lr in (0.001, 0.00316, 0.01)]
    assert asked(found) == ("the best rates, seed 1", [1], [("adam", [0.01])])
    # A rate that diverges is a rate that was tried.
    found = [r for r in every() if (r["method"], r["lr"]) != ("Adam", 0.000316)]
    assert asked([*found, course_row("Adam", 0.000316, loss=None)]) is None


def test_single_methods_can_be_run():
    assert asked([], ["Adam"])[2] == [("adam", [0.0001])]
    assert asked([course_row("Adam")], ["Adam"])[2] == [("adam", beside("Adam"))]
    with pytest.raises(ValueError, match=r"unknown method 'adam': choose from SGD momentum"):
        asked([], ["adam"])


def test_the_command_says_when_an_option_does_not_fit(tmp_path):
    done = CliRunner().invoke(command.paper, ["--scale", "cpu", "--method", "Adam"])
    assert done.exit_code == 2
    assert "--method goes with --scale course" in done.output
    done = CliRunner().invoke(
        command.paper, ["--scale", "course", "--redraw", "--output", str(tmp_path)]
    )
    assert done.exit_code == 1
    assert "rows.jsonl" in done.output


def test_the_images_are_the_first_of_each_class_in_order():
    targets = torch.tensor([0, 1, 1, 1, 0, 2, 0, 2, 1])
    assert balanced(targets, 6).tolist() == [0, 1, 2, 4, 5, 7]
    with pytest.raises(ValueError, match="multiple of 3 classes, got 4"):
        balanced(targets, 4)


class Tiny(TorchSolver):
    """SGD, to see a run cut and resumed."""

    label, default_lr, lr = "SGD", 0.1, 0.1

    def __init__(self):
        pass

    def stepper(self, training, lr):
        return OneGradient(SGD(training.model.parameters(), lr))


def run_tiny(stop_at=None):
    """Run it until the place with this number; benchopt's callback records."""
    solver = Tiny()
    solver.set_objective(small(), 0)
    places = itertools.count()

    def callback():
        if next(places) == stop_at:
            raise KeyboardInterrupt
        solver.training.record()
        return True

    solver.run(callback)
    return solver.training


def test_a_run_of_the_course_goes_on_from_its_last_measurement(tmp_path, monkeypatch):
    whole = run_tiny()
    journal = tmp_path / "rows.jsonl"
    monkeypatch.setenv("STORMPLUS_ROWS", str(journal))
    part = part_file(journal, ("small", "SGD", 0.1, 0))
    with pytest.raises(KeyboardInterrupt):
        run_tiny(stop_at=2)
    assert part.exists()
    assert share_file(part).read_text() == "0.2500"
    drawn = []
    monkeypatch.setattr(OneGradient, "step", count_steps(OneGradient.step, drawn))
    rest = run_tiny()
    assert len(drawn) == 6  # of 8: two were done before
    assert rest.curve["train_loss"] == whole.curve["train_loss"]
    assert rest.curve["samples"] == [0, 2, 4, 8]


def count_steps(step, drawn):
    def counted(self, training):
        drawn.append(training.samples)
        step(self, training)

    return counted


def test_progress_within_a_run_counts_as_progress(tmp_path, monkeypatch):
    """A process that dies halfway is started again as long as it gets further."""
    journal = tmp_path / "rows.jsonl"
    run = Run("w", "SGD", 0.1, 0, 100)
    part = part_file(journal, run.key)
    part.parent.mkdir()
    shares = iter(["0.3", "0.7"])
    rounds = []

    def dies(*_):
        rounds.append(1)
        if text := next(shares, None):
            share_file(part).write_text(text)

    monkeypatch.setattr(engine, "_round", dies)
    with pytest.raises(engine.RunsFailed, match="1 of 1 runs gave no row"):
        engine.execute(Plan({}, [run], {}, {"w": 1.0}), journal)
    assert len(rounds) == 3  # twice it got further, once it did not


def test_the_time_left_counts_what_a_run_has_done_and_is_told_in_a_file_too(tmp_path, monkeypatch):
    journal, run = tmp_path / "rows.jsonl", Run("w", "SGD", 0.1, 0, 100)
    share = share_file(part_file(journal, run.key))
    share.parent.mkdir()
    share.write_text("0.5")
    monkeypatch.setattr(engine, "POLL", 0)

    def watched():
        polls, output = iter([None, 0]), StringIO()
        child = SimpleNamespace(poll=lambda: next(polls))
        plan = Plan({}, [run], {}, {"w": 1.0})
        engine._watch(child, plan, [run], journal, Console(file=output, width=200), 1)
        return output.getvalue().splitlines()

    told = "0/1 runs, 50%, left 0:00:50"  # 50 of 100 evaluations, a second each
    assert told not in watched()  # a minute has not passed: a night gives no endless file
    monkeypatch.setattr(engine, "Pulse", partial(Pulse, every=0))
    assert watched()[0] == told


def test_the_page_of_a_whole_course():
    made = report(every(), COURSE)
    assert "not complete" not in made.text
    assert "seeds 0 and 1" in made.text
    assert "At 100 epochs:" in made.text
    assert "At 1000 gradient evaluations:" in made.text
    assert "| Adam | 0.0001 | 2 | 0.100 ± 0.000 | 0.100 ± 0.000 | 0.900 ± 0.000 |" in made.text
    assert "| Untuned |  | 2 | 0.100 ± 0.000 |" in made.text  # it has no rate to name
    assert made.text.split("### The rates")[1].count("Untuned") == 0
    assert "STORM mean, STORM+ mean; equal epochs" in made.text
    assert "not run yet" not in made.text
    assert "1,000 images" in made.summary
    assert "so far" not in made.summary
    # All are level: nobody has an advantage, everybody is close.
    assert "**reproduced**: “there is no noticeable practical advantage" in made.summary.replace(
        "\n", " "
    )
    # |d - grad f| is 2, 1, 0.5, 0.25 times the mini-batch's error at the places after the first.
    sentence = (
        "STORM+: yes, at 2 of 4 places. With gains of 0.1 to 0.1 the error of d is 0.25 to 2 times "
        "that of a mini-batch's gradient, at the end 0.25 times."
    )
    assert sentence in made.text.replace("\n", " ")
    assert sentence in made.summary.replace("\n", " ")
    assert "| STORM+, epoch 50 | 0.1 | 1 | 1 | 1 | 1 | 0.5 | 1 | 0.5 |" in made.text
    assert r"| $\vert g \vert$ |" in made.text
    assert (
        "Not learned by heart: STORM+ 0.45 (0.1, training accuracy 0.90), "
        in made.summary.replace("\n", " ")
    )


@pytest.mark.parametrize(
    ("gains", "ratios", "sentence"),
    [
        ([0.95, 1.0], [0.5, 3.0], "M: no, nothing is averaged. The gain is 0.950 or more, so that"),
        ([0.5, 0.1], [1.0, 3.0], "M: no. With gains of 0.5 to 0.1 the error of d is 1 to 3 times"),
        ([0.5, 0.1], [0.5, 0.2], "M: yes, everywhere. With gains of 0.5 to 0.1 the error of d is"),
        ([0.5, 0.1], [math.nan] * 2, "M: the estimator's error was not measured."),
    ],
)
def test_whether_the_variance_is_reduced_is_told_with_the_gain(gains, ratios, sentence):
    assert course.reduced("M", pd.DataFrame({"gain": gains, "ratio": ratios})).startswith(sentence)


def test_who_knows_the_images_by_heart_comes_first():
    found = [course_row("Adam", accuracy=1.0), course_row("STORM+", accuracy=0.3)]
    found.append(course_row("AdaGrad", accuracy=0.995))
    summary = report(found, COURSE).summary.replace("\n", " ")
    assert (
        "test accuracy (and test loss): Adam 0.50 (0.1), AdaGrad 0.50 (0.1). Not learned" in summary
    )


def test_the_page_says_what_is_not_there_yet():
    found = [course_row("SGD momentum"), course_row("STORM+ mean"), course_row("Adam")]
    found += [course_row("Adam", lr, loss=0.2) for lr in beside("Adam")]
    made = report(found, COURSE)
    text = made.text.replace("\n", " ")
    assert "**The course is not complete.** Not run yet: STORM+, Untuned, " in text
    assert "still to be run for: STORM+ mean, SGD momentum." in text
    assert "One seed only so far, so no error bars: Adam." in text
    assert text.count("not run yet") == 7 * 4
    summary = made.summary.replace("\n", " ")
    assert "Not every run of this course has been made yet" in summary
    assert "cannot be judged before STORM mean, AdaGrad has run" in summary
    assert "heart: STORM+ mean 0.45 (0.1, training accuracy 0.90), SGD momentum 0.45 (" in summary
    with pytest.raises(ValueError, match="no run of the course"):
        report([], COURSE)
    assert "### The rates" not in report([course_row("Untuned")], COURSE).text  # it has none


def test_the_best_rate_is_that_of_the_first_seed_at_the_end():
    found = every()
    found.append(course_row("Adam", 0.000316, loss=0.05))
    text = report(found, COURSE).text
    assert "| Adam | 0.000316 | 1 | 0.050 | 0.050 |" in text
    assert "**0.050**" in text


def test_the_figures_fit_a_column_of_text_and_say_what_has_not_run():
    drawn = report([course_row("STORM+ mean"), course_row("Adam")], COURSE).figures()
    assert {figure.get_figwidth() for figure in drawn.values()} == {WIDTH}
    said = [[text.get_text() for text in axis.texts] for axis in drawn["estimator"].axes]
    assert said == [[], [], [], ["not run yet"], [], []]  # the norms of STORM+


@pytest.mark.long
def test_the_files_of_the_course_are_written_from_its_rows(tmp_path):
    journal = write_rows(tmp_path / "rows.jsonl", every())
    made = [f.name for f in write(journal, COURSE, tmp_path)]
    assert made == ["course.png", "estimator.png", "course.md"]
    assert all((tmp_path / name).stat().st_size > 0 for name in made)
    done = CliRunner().invoke(
        command.paper, ["--scale", "course", "--redraw", "--output", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert "course.md" in done.output


def test_the_frame_does_not_mind_what_a_row_has_on_top(tmp_path):
    journal = write_rows(tmp_path / "rows.jsonl", [course_row("STORM+"), course_row("STORM+")])
    assert isinstance(rows.load(journal), pd.DataFrame)
    (row,) = rows.read(journal)  # the last one of a run
    assert row["estimator"]["error_sq"][1] == 4.0


@pytest.mark.long
@pytest.mark.skipif("STORMPLUS_DATA" not in os.environ, reason="STORMPLUS_DATA is not set")
def test_the_smallest_course_runs_to_its_end_and_keeps_nothing_half_done(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "RATES", 1)  # one is enough to see that it runs
    run = ["--scale", "course-smoke", "--method", "STORM+", "--output", str(tmp_path)]
    done = CliRunner().invoke(command.paper, run)
    assert done.exit_code == 0, done.output
    found = rows.read(tmp_path / "rows.jsonl")
    assert {row["seed"] for row in found} == {0, 1}
    assert all(row["curve"]["samples"][-1] == 4 for row in found)  # two epochs of two batches
    assert all(row["curve"]["evaluations"][-1] == 7 for row in found)
    assert all(len(row["estimator"]["error_sq"]) == 5 for row in found)
    assert (tmp_path / "course.md").exists()
    assert not list((tmp_path / "rows.parts").iterdir())
