"""`stormplus report`: files, exit codes, messages, README."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
pytest.importorskip("click")

import pandas as pd
from bench_reports import README, call, finished, write_rows
from bench_rows import frame_of, make_run, swept

from stormplus.bench import rows, scores, statements
from stormplus.bench.report_command import read


@pytest.fixture(scope="module")
def finished_report(tmp_path_factory):
    return finished(tmp_path_factory.getbasetemp())


def test_everything_is_written(finished_report):
    folder, _ = finished_report
    output = folder / "docs" / "r"
    assert {path.name for path in output.iterdir()} == {
        *("index.html", "figures", "table.csv", "results.md"),
    }
    overviews = {"cost_of_not_tuning", "performance_profile", "sensitivity"}
    overviews |= {"curves_default", "curves_tuned"}
    figures = {path.name for path in (output / "figures").iterdir()}
    each = {f"{kind}_{w}.svg" for kind in ("curves", "sensitivity") for w in "ab"}
    assert figures == each | {f"{name}.{end}" for name in overviews for end in ("png", "svg")}
    table = pd.read_csv(output / "table.csv")
    assert len(table) == 6
    marked = table[table["at_end"]]
    assert marked[["workload", "method", "tuned_lr"]].to_numpy().tolist() == [
        ["a", "SGD", 1.0],
        ["a", "STORM+", 1.0],
    ]


def test_a_cut_line_is_a_warning(finished_report):
    folder, result = finished_report
    assert "rows.jsonl, line 18 is cut short and left out" in result.stderr
    assert "Warning" not in result.stdout


def test_it_says_plainly_where_storm_plus_wins_ties_and_loses(finished_report):
    _, result = finished_report
    # Defaults: a: 1..3 against SGD's 4, a win; b: 1 against SGD's 0.5, a loss.
    # Best lr: a: 1..3 against SGD's 0..1, a tie; Adam on a and all on b ran one lr.
    assert (
        "STORM+, with every method at its default lr: better than the best other method on 1 of "
        "2 workloads: a; level with it on 0; worse than it on 1: b (to SGD)." in result.stdout
    )
    assert (
        "STORM+, with every method at its best lr (methods with one learning rate are left out): "
        "better than the best other method on 0 of 1 workload; level with it on 1: a; worse than "
        "it on 0." in result.stdout
    )
    # (1.5 / 9.5 + 0.5 / 1.5) / 2 = 24.6 %
    assert "STORM+ untuned leaves 25 % of the possible decrease" in result.stdout
    assert "place 2 of 3." in result.stdout


def test_nothing_is_said_of_left_out_methods_if_there_are_none(tmp_path):
    said = statements.statements(frame_of(tmp_path, swept()))["STORM+"]
    assert said[1].startswith("**STORM+**, with every method at its best lr: better than the best")
    assert said[1].endswith("level with it on 1: a; worse than it on 1: b (to SGD).")


def test_a_method_of_ours_with_one_lr_is_not_called_tuned(tmp_path):
    runs = [
        make_run([2, 1], method="STORM+"),
        make_run([2, 1]),
        make_run([2, 1], lr=1, default=False),
    ]
    summary = statements.summary(frame_of(tmp_path, runs))
    assert not any("best lr" in text for text in summary.said["STORM+"])
    assert summary.duels.loc["SGD"].to_list() == ["0 / 1 / 0", ""]
    assert summary.scores.loc["STORM+", "profile score, best lr"] == ""


def test_only_methods_that_ran_every_workload_have_a_place(tmp_path):
    runs = [make_run([4, 1], workload=w, method=m) for w in "ab" for m in ("SGD", "STORM+ mean")]
    runs += [make_run([4, 0], workload="a", method="STORM+")]
    frame = frame_of(tmp_path, runs)
    said = statements.statements(frame)
    assert said["STORM+"][-1].endswith(
        "leaves 0 % of the possible decrease on the table on average (1 of 2 workloads): without "
        "a place, which takes a run on every workload."
    )
    assert said["STORM+ mean"][-1].endswith("place 2 of 2 that ran on every workload.")
    table = statements.score_table(frame)
    assert list(table["place"]) == ["1", "2", ""]
    assert table.iloc[2]["cost of not tuning, %"] == "0 (1 of 2 workloads)"
    assert table.iloc[2]["profile score, default"] == "0.50 (1 of 2 workloads)"


def test_a_target_that_nobody_reaches_bounds_the_scores(tmp_path):
    # The target of b is what Adam at 0.1 has after half of the budget; no default gets there.
    runs = [make_run([4, 2, 1, 1, 1], workload=w, method=m) for w in "ab" for m in ("SGD", "Adam")]
    frame = frame_of(tmp_path, runs)
    assert statements.ceiling(scores.performance_profile(frame)) == ""
    tuned = make_run([4, 2, 0.5, 0.5, 0.5], workload="b", method="Adam", lr=0.2, default=False)
    frame = frame_of(tmp_path / "b", [*runs, tuned])
    expected = (
        "At the default lr no method reaches the target of b: no profile score there can be "
        "above 0.50."
    )
    assert statements.ceiling(scores.performance_profile(frame)) == expected
    text = statements.markdown_section(statements.summary(frame), "figures", "make")
    assert expected in text.replace("\n", " ")


def test_two_budgets_of_one_workload_are_refused(tmp_path):
    path = write_rows(
        tmp_path / "rows.jsonl", [make_run([2, 1]), make_run([2, 1], seed=1, budget=3000)]
    )
    result = call(path, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "the runs of w have budgets of 100, 3,000 gradient evaluations" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_facts_tell_how_many_examples_were_measured(tmp_path):
    runs = [
        make_run([2, 1], workload=w, measured=n) for w, n in (("a", 5), ("b", 2000), ("c", None))
    ]
    runs.append(make_run([2, 1], workload="b", seed=1, measured=3000))
    summary = statements.summary(frame_of(tmp_path, runs))
    assert summary.facts.measured == {"a": "5", "b": "2,000 or 3,000"}
    text = statements.markdown_section(summary, "figures", "make")
    assert "Examples that the losses are measured on: a 5, b 2,000 or 3,000." in text


def test_the_section_of_the_readme_is_replaced_in_place(finished_report):
    folder, _ = finished_report
    text = (folder / "README.md").read_text()
    assert text.startswith("# Title\n\nBefore.\n\n" + statements.BEGIN)
    assert text.endswith(statements.END + "\n\nAfter.\n")
    assert "old" not in text
    assert "16 runs of 3 methods on 2 workloads, 2 seeds, on a test; 3 runs diverged." in text
    assert "| SGD | 1 / 0 / 1 | 0 / 1 / 0 |" in text
    assert "| Adam | 2 / 0 / 0 |  |" in text
    # STORM+: 1 of 1 and 10; SGD: 1 of 0.1 and 1.
    told = (
        "In 2 of 2 cases (a method on a workload) the best rate is at an end of the range: a wider"
    )
    assert told in text.replace("\n", " ")
    links = re.findall(r"\]\((.*?)\)", text)
    assert links
    assert all((folder / link).exists() for link in links)
    assert all(len(line) <= 96 for line in text.splitlines() if line[:1] not in "|!")
    assert not list(folder.glob("*.new"))


def test_the_results_file_has_the_same_words(finished_report):
    folder, _ = finished_report
    text = (folder / "docs" / "r" / "results.md").read_text()
    assert "| SGD | 1 / 0 / 1 | 0 / 1 / 0 |" in text
    assert "(figures/cost_of_not_tuning.png)" in text


def test_help_teaches():
    result = call("--help")
    assert result.exit_code == 0
    for part in ("rows.jsonl", "Examples", "Exit codes", "index.html", "results:begin"):
        assert part in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (rows.HEADER + "\n", "no run in there yet"),
        ("hello\n", "line 1: not a journal"),
        ('{"format": "stormplus-rows", "version": 7}\n', "format version 7, this stormplus reads"),
        (rows.HEADER + "\n{}\n", "line 2: 'workload' should be str"),
        (rows.HEADER + "\n" + json.dumps(make_run([1], default=False)) + "\n", "default"),
    ],
)
def test_rows_that_cannot_be_used_end_with_one_and_a_message(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    result = call(path, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.stderr
    assert str(path) in result.stderr
    assert not (tmp_path / "out").exists()


def test_two_defaults_of_one_method_are_explained(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [make_run([2, 1], lr=lr) for lr in (0.1, 1.0)])
    result = call(path, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "SGD has 2 default learning rates on w" in result.stderr


def test_a_call_without_rows_ends_with_two(tmp_path):
    assert call().exit_code == 2
    assert call(tmp_path / "nowhere.jsonl").exit_code == 2


@pytest.mark.parametrize("text", ["no markers", statements.END + statements.BEGIN, README + README])
def test_a_readme_without_its_markers_is_left_alone(tmp_path, text):
    path = write_rows(tmp_path / "rows.jsonl", [make_run([2, 1])])
    readme = tmp_path / "README.md"
    readme.write_text(text)
    result = call(path, "--output", tmp_path / "out", "--readme", readme)
    assert result.exit_code == 1
    assert "README.md should have the lines <!-- results:begin -->" in result.stderr
    assert readme.read_text() == text
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "runs",
    [
        [make_run([5], status="diverged"), make_run([5], method="STORM+", status="diverged")],
        [make_run([2, 1], method='<b>"&')],
        [make_run([1e20, 1e-20], method="STORM+", workload="a/b")],
    ],
    ids=["diverged", "without ours", "ours alone"],
)
def test_odd_rows_have_a_report_too(tmp_path, runs):
    path = write_rows(tmp_path / "rows.jsonl", runs)
    result = call(path, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert '<b>"&' not in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.long  # draws the whole page
def test_the_picture_of_the_readme_can_be_kept_elsewhere(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [make_run([2, 1])])
    readme = tmp_path / "README.md"
    readme.write_text(f"{statements.BEGIN}\n{statements.END}\n")
    keep = tmp_path / "docs" / "figures"
    result = call(path, "--output", tmp_path / "out", "--readme", readme, "--keep", keep)
    assert result.exit_code == 0, result.output
    assert "](docs/figures/cost_of_not_tuning.png)" in readme.read_text()
    shown = re.findall(r"\]\(docs/figures/(.*?)\)", readme.read_text())
    assert {file.name for file in keep.iterdir()} == set(shown)
    assert "--keep" in readme.read_text()


@pytest.mark.long
def test_the_readme_says_what_the_committed_rows_say():
    """`make report` would change nothing."""
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text()
    section = statements.BEGIN + readme.split(statements.BEGIN)[1].split(statements.END)[0]
    command = re.search(r"`(stormplus report .*?)`", " ".join(section.split()))[1]
    frame = read(tuple(root / name for name in command.split() if name.endswith(".jsonl.gz")))
    again = statements.markdown_section(statements.summary(frame), "docs/figures", command)
    assert again.split(statements.END)[0] == section
