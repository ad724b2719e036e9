"""`stormplus report`: sentences, files, exit codes, README, and a page that stands alone."""

import errno
import html
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from bench_rows import frame_of, hand_made, make_row, swept, write_rows
from click.testing import CliRunner

from stormplus.progress import Pulse
from stormplus_bench import markdown, profiles, rows, sentences
from stormplus_bench.commands import report as command
from stormplus_bench.commands.report import read, report

ROOT = Path(__file__).parents[2]
BEGIN, END = markdown.markers("results")
README = f"# Title\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"


def call(*arguments):
    return CliRunner().invoke(report, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One report of the hand-made rows; the journal ends in the middle of a line."""
    folder = tmp_path_factory.mktemp("report")
    path = write_rows(folder / "rows.jsonl", hand_made())
    with path.open("a") as file:
        file.write('{"workload": "a", "met')
    (folder / "README.md").write_text(README)
    result = call(path, "--output", folder / "docs" / "r", "--readme", folder / "README.md")
    assert result.exit_code == 0, result.output
    return folder, result


@pytest.fixture(scope="module")
def page(finished):
    return (finished[0] / "docs" / "r" / "index.html").read_text()


def test_the_words_need_no_matplotlib():
    code = "import sys, stormplus_bench.sentences; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_everything_is_written(finished):
    folder, result = finished
    output = folder / "docs" / "r"
    assert {p.name for p in output.iterdir()} == {*("index.html", "figures", "table.csv")} | {
        "results.md"
    }
    overviews = ("cost_of_not_tuning", "performance_profile", "sensitivity-others")
    overviews += ("curves-default-others", "curves-tuned-others")
    each = {f"{kind}_{w}.svg" for kind in ("curves", "sensitivity") for w in "ab"}
    assert {path.name for path in (output / "figures").iterdir()} == each | {
        f"{name}.{end}" for name in overviews for end in ("png", "svg")
    }
    table = pd.read_csv(output / "table.csv")
    assert len(table) == 6
    marked = table[table["at_end"]][["workload", "method", "tuned_lr"]]
    assert marked.to_numpy().tolist() == [["a", "SGD", 1.0], ["a", "STORM+", 1.0]]
    assert "rows.jsonl, line 18 is cut short and left out" in result.stderr
    assert "Warning" not in result.stdout
    text = (output / "results.md").read_text()
    assert "| SGD | 1 / 0 / 1 | 0 / 1 / 0 |" in text
    assert "(figures/cost_of_not_tuning.png)" in text


def test_it_says_plainly_where_storm_plus_wins_ties_and_loses(finished):
    # Defaults: a: 1..3 against SGD's 4, a win; b: 1 against SGD's 0.5, a loss.
    # Best lr: a: 1..3 against SGD's 0..1, a tie; Adam on a and all on b ran one lr.
    # Cost: (1.5 / 9.5 + 0.5 / 1.5) / 2 = 24.6 %.
    assert finished[1].stdout.splitlines()[:3] == [
        "STORM+, with every method at its default lr: better than the best other method on 1 of "
        "2 workloads: a; level with it on 0; worse than it on 1: b (to SGD).",
        "STORM+, with every method at its best lr (methods with one learning rate are left out): "
        "better than the best other method on 0 of 1 workload; level with it on 1: a; worse than "
        "it on 0.",
        "STORM+ at its default leaves 25 % of the possible decrease on the table on average: "
        "place 2 of 3.",
    ]
    _, tuned, _ = sentences.sentences(frame_of(swept()))["STORM+"]  # nobody is left out
    assert tuned.startswith("**STORM+**, with every method at its best lr: better than the best")
    assert tuned.endswith("level with it on 1: a; worse than it on 1: b (to SGD).")


def test_a_method_of_ours_with_one_lr_is_not_called_tuned():
    found = [make_row([2, 1], method="STORM+"), make_row([2, 1])]
    told = sentences.findings(frame_of([*found, make_row([2, 1], lr=1, default=False)]))
    assert not any("best lr" in text for text in told.sentences["STORM+"])
    assert told.duels.loc["SGD"].to_dict() == {"STORM+, default": "0 / 1 / 0"}
    assert told.scores.loc["STORM+", "profile score, best lr"] == ""


def test_only_methods_that_ran_every_workload_have_a_place():
    found = [make_row([4, 1], workload=w, method=m) for w in "ab" for m in ("SGD", "STORM+ mean")]
    frame = frame_of([*found, make_row([4, 0], workload="a", method="STORM+")])
    told = sentences.sentences(frame)
    assert told["STORM+"][-1].endswith(
        "leaves 0 % of the possible decrease on the table on average (1 of 2 workloads): without "
        "a place, which takes a run on every workload."
    )
    assert told["STORM+ mean"][-1].endswith("place 2 of 2 that ran on every workload.")
    table = sentences.score_table(frame)
    assert list(table["place"]) == ["1", "2", ""]
    assert table.iloc[2]["cost of not tuning, %"] == "0 (1 of 2 workloads)"
    assert table.iloc[2]["profile score, default"] == "0.50 (1 of 2 workloads)"


def test_the_map_is_a_table_too():
    found = [make_row([4, 2], workload=w, method=m) for w in "ab" for m in ("SGD", "Adam")]
    found += [make_row([4, 1], workload="a", method="STORM+")]
    text = sentences.results_section(sentences.findings(frame_of(found)), "f", "make")
    lines = text.split(sentences.MAP)[1].split("\n\n")[1].splitlines()
    assert lines[0] == "| method | a | b | mean |"
    assert {"| Adam | 33 | 0 | 17 |", "| STORM+ | 0 | · | 0 |"} <= set(lines)


def test_a_target_that_nobody_reaches_bounds_the_scores():
    # The target of b is what Adam at 0.2 has after half of the budget; no default gets there.
    both = [make_row([4, 2, 1, 1, 1], workload=w, method=m) for w in "ab" for m in ("SGD", "Adam")]
    assert sentences.ceiling(profiles.performance_profile(frame_of(both))) == ""
    tuned = make_row([4, 2, 0.5, 0.5, 0.5], workload="b", method="Adam", lr=0.2, default=False)
    text = sentences.results_section(sentences.findings(frame_of([*both, tuned])), "f", "make")
    assert (
        "At the default lr no method reaches the target of b: no profile score there can be above "
        "0.50."
    ) in text.replace("\n", " ")


def test_the_facts_tell_how_many_examples_were_measured():
    numbers = (("a", 5), ("b", 2000), ("c", None))
    found = [make_row([2, 1], workload=w, measured=n) for w, n in numbers]
    found.append(make_row([2, 1], workload="b", seed=1, measured=3000))
    told = sentences.findings(frame_of(found))
    assert told.facts.measured == {"a": "5", "b": "2,000 or 3,000"}
    text = sentences.results_section(told, "figures", "make")
    assert "Examples that the losses are measured on: a 5, b 2,000 or 3,000." in text


def test_the_section_of_the_readme_is_replaced_in_place(finished):
    folder, _ = finished
    text = (folder / "README.md").read_text()
    assert text.startswith("# Title\n\nBefore.\n\n" + BEGIN)
    assert text.endswith(END + "\n\nAfter.\n")
    assert "old" not in text
    assert "16 runs of 3 methods on 2 workloads, 2 seeds, on a test; 3 runs diverged." in text
    assert "| SGD | 1 / 0 / 1 | 0 / 1 / 0 |" in text
    assert "| Adam | 2 / 0 / 0 |  |" in text
    # STORM+: 1 of 1 and 10; SGD: 1 of 0.1 and 1.
    words = "In 2 of 2 cases (a method on a workload) the best rate is at an end of the range"
    assert words in text.replace("\n", " ")
    links = re.findall(r"\]\((.*?)\)", text)
    assert links
    assert all((folder / link).exists() for link in links)
    assert all(len(line) <= 96 for line in text.splitlines() if line[:1] not in "|!")
    assert not list(folder.glob("*.new"))


def test_help_teaches_and_a_call_without_rows_ends_with_two(tmp_path):
    text = call("--help").output
    for part in ("rows.jsonl", "Examples", "Exit codes", "index.html", "results:begin"):
        assert part in text
    assert "\\b" not in text
    lines = [line.strip() for line in text.splitlines()]
    assert "results.md    the same in words: where STORM+ wins, ties and loses" in lines
    assert "2    the command was not called properly" in lines
    assert call().exit_code == 2
    assert call(tmp_path / "nowhere.jsonl").exit_code == 2


def lines(*found):
    return rows.HEADER + "\n" + "".join(json.dumps(row) + "\n" for row in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (lines(), "no run in there yet"),
        (lines({}), "line 2: 'workload' should be str"),
        (lines(make_row([1], default=False)), "default"),
        (lines(*(make_row([2, 1], lr=lr) for lr in (0.1, 1.0))), "SGD has 2 default learning rate"),
        (
            lines(make_row([2, 1]), make_row([2, 1], seed=1, budget=3000)),
            "the runs of w have budgets of 100, 3,000 gradient evaluations",
        ),
    ],
)
def test_rows_that_cannot_be_used_end_with_one_and_a_message(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    result = call(path, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["no markers", END + BEGIN, README + README])
def test_a_readme_without_its_markers_is_left_alone(tmp_path, text):
    path = write_rows(tmp_path / "rows.jsonl", [make_row([2, 1])])
    readme = tmp_path / "README.md"
    readme.write_text(text)
    result = call(path, "--output", tmp_path / "out", "--readme", readme)
    assert result.exit_code == 1
    assert "README.md should have the lines <!-- results:begin -->" in result.stderr
    assert readme.read_text() == text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["--output", "--keep"])
def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_drawn(
    tmp_path, monkeypatch, place
):
    monkeypatch.setattr(command, "draw", lambda *_: pytest.fail("drew"))
    path = write_rows(tmp_path / "rows.jsonl", [make_row([2, 1])])
    (tmp_path / "README.md").write_text(README)
    given = {"--output": tmp_path / "out", "--readme": tmp_path / "README.md"}
    given |= {place: path / "here"}
    result = call(path, *(part for pair in given.items() for part in pair))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "rows.jsonl/here" in result.stderr


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", [make_row([2, 1])])

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = call(path, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert re.search(r"Error: .*No space left on device.*cost_of_not_tuning\.svg", result.stderr)


def test_names_from_outside_do_no_harm_and_a_log_shows_life(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Pulse", partial(Pulse, every=0))
    long = f"{'x/' * 300}<script>alert(1)</script>{END}"
    found = [make_row([2, 1], method=m, workload=long) for m in (r"$\frac{$", "STORM+", "_a|b<i>")]
    path = write_rows(tmp_path / "rows.jsonl", found)
    readme = tmp_path / "README.md"
    readme.write_text(README)
    result = call(path, "--output", tmp_path / "out", "--readme", readme)
    assert result.exit_code == 0, result.output
    assert "1/7 figures drawn" in result.stderr
    for file in (readme, tmp_path / "out" / "results.md"):
        text = file.read_text()
        assert (text.count(BEGIN), text.count(END)) == (1, 1)
        assert "<script>" not in text
        assert "<i>" not in text
        assert r"| _a\|b&lt;i&gt; |" in text
    assert readme.read_text().endswith("After.\n")
    assert "<script>alert" not in (tmp_path / "out" / "index.html").read_text()
    figures = [file.name for file in (tmp_path / "out" / "figures").iterdir()]
    assert len(figures) == 12  # seven, and five of them as PNG too
    assert max(map(len, figures)) < 150


ODD = {
    "diverged": [make_row([5], method=m, status="diverged") for m in ("SGD", "STORM+")],
    "without ours": [make_row([2, 1], method='<b>"&')],
    "ours alone": [make_row([1e20, 1e-20], method="STORM+", workload="a/b")],
    "kept elsewhere": [make_row([2, 1], measured=2000)],
}


@pytest.mark.long  # each draws the whole page
@pytest.mark.parametrize("name", ODD)
def test_odd_rows_have_a_report_too_and_its_figures_can_be_kept_elsewhere(tmp_path, name):
    path = write_rows(tmp_path / "rows.jsonl", ODD[name])
    readme, keep = tmp_path / "README.md", tmp_path / "docs" / "figures"
    readme.write_text(f"{BEGIN}\n{END}\n")
    result = call(path, "--output", tmp_path / "out", "--readme", readme, "--keep", keep)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "index.html").read_text()
    assert '<b>"&' not in text
    measured = "<dt>Examples that the losses are measured on</dt><dd>w 2,000</dd>"
    assert (measured in text) == (name == "kept elsewhere")
    assert "](docs/figures/cost_of_not_tuning.png)" in readme.read_text()
    shown = re.findall(r"\]\(docs/figures/(.*?)\)", readme.read_text())
    assert {file.name for file in keep.iterdir()} == set(shown)
    assert "--keep" in readme.read_text()


@pytest.mark.long
def test_the_readme_says_what_the_committed_rows_say():
    """`make report` would change nothing."""
    readme, site = ROOT / "README.md", ROOT / "docs" / "benchmark.md"
    section = site.read_text().split(BEGIN)[1].split(END)[0]
    given = re.search(r"`(stormplus report .*?)`", " ".join(section.split()))[1]
    frame = read(tuple(ROOT / name for name in given.split() if name.endswith(".jsonl.gz")))
    found = sentences.findings(frame)
    times = command.read_step_times(ROOT / "docs" / "results" / "step_time.json")
    table = sentences.readme_table(found, times)
    assert command.in_page(readme, "", table) == readme.read_text()
    results = sentences.results_section(found, "figures", given)
    assert command.in_page(site, results, "") == site.read_text()


def test_unseen_data_by_accuracy_or_by_loss_where_there_is_none():
    found = [make_row([4, 3], workload=w, method="Adam") for w in ("mlp-digits", "nmf")]
    found += [make_row([4, 2], workload="autoencoder-mnist", method=m) for m in ("Adam", "SGD")]
    found[0]["curve"] = found[0]["curve"] | {"valid_accuracy": [0.1, 0.9876]}
    found.append(make_row([4, 2], workload="mlp-digits", method="Untuned", status="diverged"))
    told = sentences.findings(frame_of(found))
    assert told.unseen.to_dict() == {
        "autoencoder-mnist": {"Untuned": "", "Adam": "loss 2"},
        "mlp-digits": {"Untuned": "", "Adam": "98.8 %"},
    }
    assert "| Adam | loss 2 | 98.8 % |" in sentences.results_section(told, "figures", "make")
    none = sentences.findings(frame_of([make_row([2, 1])]))
    assert "On unseen data" not in sentences.results_section(none, "figures", "make")


def test_a_page_with_a_table_gets_the_table_only(tmp_path):
    found = [
        make_row([4, last], workload=w, method=m)
        for w in ("nmf", "mlp-digits")
        for m, last in (("Adam", 2), ("Untuned", 1), ("a stranger", 1))
    ]
    told = sentences.findings(frame_of(found))
    text = sentences.readme_table(told, {"Untuned": 1.234})
    assert "| Untuned | 1 | 2 | none | 0 | 0 | 1.2 |" in text
    assert "| Adam | 1 | 2 | lr, schedule | 33 | 33 |  |" in text
    assert "stranger" not in text
    assert "`Untuned` leaves 0 % of the possible decrease" in text
    assert "; Adam 33 %." in " ".join(text.split())
    nobody = sentences.findings(frame_of([make_row([2, 1])]))
    assert "Untuned" not in sentences.readme_table(nobody, {})
    assert "step time" not in sentences.readme_table(told, {})
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table:begin -->\nold\n<!-- table:end -->\nAfter.\n")
    filled = command.in_page(page, "all", text)
    assert "| Untuned |" in filled
    assert "all" not in filled
    assert "old" not in filled


def test_step_times_of_another_kind_are_told_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "draw", lambda *_: pytest.fail("drew"))
    path = write_rows(tmp_path / "rows.jsonl", [make_row([2, 1])])
    times = tmp_path / "times.json"
    times.write_text("[]")
    result = call(path, "--output", tmp_path / "out", "--step-times", times)
    assert result.exit_code == 1
    assert "times.json is not what benchmark/scripts/step_time.py writes" in result.stderr


class Page(HTMLParser):
    """What a page refers to, and what it says about its figures and headings."""

    def __init__(self, text):
        super().__init__()
        self.references, self.labels, self.headers, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        outward = ("src", "href", "xlink:href", "action", "data")
        self.references += [v for k, v in attrs if k in outward]
        self.ids += [found["id"]] if "id" in found else []
        if tag == "svg":
            self.labels.append(found.get("aria-label") or found.get("aria-hidden"))
        if tag == "th":
            self.headers.append(found)


def test_the_page_needs_nothing_from_outside(page):
    parsed = Page(page)
    assert parsed.references
    assert {value[:1] for value in parsed.references} == {"#"}
    assert {value[1:] for value in parsed.references} <= set(parsed.ids)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\((?!#)", page)
    assert len(page) < 1_000_000


def test_the_page_can_be_read_without_seeing_it(page):
    parsed = Page(page)
    assert all(parsed.labels)
    words = "Training loss on a. Final, at the defaults: STORM+ 2, SGD 4, Adam div"
    assert any(label.startswith(words) for label in parsed.labels)
    sortable = [header for header in parsed.headers if "data-key" in header]
    assert len(sortable) == 19
    assert all(h["aria-sort"] == "none" and h["scope"] == "col" for h in sortable)


def test_the_page_states_what_was_run(page):
    text = html.unescape(page)
    for fact in (
        "16, of which 3 diverged",
        "stormplus 0.1.0, torch 2.13.0",
        "a test",
        "a 100 (batch 64), b 100 (batch 64)",
        "<dt>Seeds</dt><dd>0, 1</dd>",
        "<dt>Best rates</dt><dd>In 2 of 2 cases (a method on a workload) the best rate is at an",
    ):
        assert fact in text
    assert "measured on</dt>" not in text  # the rows do not tell
    # A best rate at an end is marked, and sorts as a number.
    assert text.count('<td data-value="1">1 (end)</td>') == 2  # STORM+ and SGD on a
    assert text.count(" (only)</td>") == 4
    assert '<td data-value="0.001">0.001 (only)</td>' in text


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# What a reader does: two clicks on a heading, another workload, one method less.
CLICKS = """<script>
const say = (name, value) => document.body.setAttribute("data-" + name, JSON.stringify(value));
const column = (i) => [...document.querySelectorAll("#results tbody tr")].map(
  (row) => row.cells[i].textContent);
const header = document.querySelector("th[data-key=loss]");
const shown = (query) => [...document.querySelectorAll(query)].filter(
  (part) => getComputedStyle(part).display !== "none").length;
say("before", column(2));
header.querySelector("button").click();
say("up", column(2)); say("sort-up", header.getAttribute("aria-sort"));
header.querySelector("button").click();
say("down", column(2)); say("sort-down", header.getAttribute("aria-sort"));
say("sections", shown("section.workload"));
const lines = document.getElementById("lines-of");
lines.value = "b"; lines.dispatchEvent(new Event("change"));
say("rows", shown("#results tbody tr"));
const count = () => shown('svg [id*="m--sgd--"]');
const had = count();
document.querySelector("fieldset.methods input[value=sgd]").click();
say("lines", [had > 0, count()]);
say("requests", performance.getEntriesByType("resource").map((entry) => entry.name));
</script></body>"""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_the_page_works_in_a_browser_without_a_network(page, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", CLICKS))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--dump-dom", file.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    body = re.search(r"<body[^>]*>", result.stdout)[0]
    # Final losses at the defaults by workload and method, as they stand in the page.
    assert {
        name: json.loads(html.unescape(value))
        for name, value in re.findall(r'data-([a-z-]+)="([^"]*)"', body)
    } == {
        "before": ["diverged", "4", "2", "diverged", "0.5", "1"],
        "up": ["0.5", "1", "2", "4", "diverged", "diverged"],
        "down": ["diverged", "diverged", "4", "2", "1", "0.5"],
        "sort-up": "ascending",
        "sort-down": "descending",
        "sections": 1,  # the figures of one workload at a time
        "rows": 3,
        "lines": [True, 0],
        "requests": [],
    }
    assert "Content Security Policy" not in result.stderr
    assert "Uncaught" not in result.stderr
