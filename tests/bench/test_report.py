"""`stormplus report`: tables, files, exit codes, pages, and names from outside."""

import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from tests.support.bench_rows import frame_of, hand_made, make_row, write_rows

from stormplus_bench import page, rows, tables
from stormplus_bench.commands.report import read, read_step_times, report

ROOT = Path(__file__).parents[2]
PAGE = "Before.\n<!-- gap:begin -->\nold\n<!-- gap:end -->\n<!-- other:begin -->\n"


def call(*arguments):
    return CliRunner().invoke(report, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One report of the hand-made rows."""
    folder = tmp_path_factory.mktemp("report")
    path = write_rows(folder / "rows.jsonl", hand_made())
    (folder / "real.md").write_text(PAGE)
    (folder / "link.md").symlink_to("real.md")
    result = call(path, "--output", folder / "r", "--readme", folder / "link.md", "--home", "../x")
    assert result.exit_code == 0, result.output
    return folder, result


def test_everything_is_written(finished):
    folder, result = finished
    names = {"index.html", "table.csv", "gap_at_defaults.png", "gap_at_defaults.svg"}
    assert {path.name for path in (folder / "r").iterdir()} == names
    assert len(pd.read_csv(folder / "r" / "table.csv")) == 6
    assert '<a href="../x">' in (folder / "r" / "index.html").read_text()
    assert result.stdout.splitlines()[2].split() == ["SGD", "1", "18", "2", "1.00"]


def test_the_table_of_a_page_is_replaced_also_through_a_link(finished):
    folder, _ = finished
    assert (folder / "link.md").is_symlink()
    # SGD: 3.5 / 9.5 and 0; STORM+: 1.5 / 9.5 and 0.5 / 1.5.
    assert (folder / "real.md").read_text() == (
        "Before.\n<!-- gap:begin -->\n\n| method | a | b | mean |\n|---|---|---|---|\n"
        "| SGD | 37 | 0 | 18 |\n| STORM+ | 16 | 33 | 25 |\n| Adam | div. | div. | 100 |\n\n"
        "<!-- gap:end -->\n<!-- other:begin -->\n"
    )


def test_the_menu_of_the_page_replaces_the_points_and_keeps_the_ticks():
    figure = page.curves_figure(frame_of(hand_made()))
    assert [line.name for line in figure.data if line.visible is True] == ["STORM+", "Adam"]
    button = figure.layout.updatemenus[0].buttons[1]
    assert (button.method, button.label) == ("restyle", "a, best lr")
    ends = dict(zip(("STORM+", "SGD", "Adam"), button.args[0]["y"]))
    assert (ends["STORM+"][-1], ends["SGD"][-1], ends["Adam"]) == (2, 0.5, [])  # Adam ran one lr


@pytest.mark.parametrize(
    "text", ["no markers", "<!-- gap:end --><!-- gap:begin -->", PAGE + PAGE, "<!-- gap:begin -->"]
)
def test_a_page_without_its_markers_is_left_alone(tmp_path, text):
    path = write_rows(tmp_path / "rows.jsonl", [make_row([2, 1])])
    readme = tmp_path / "README.md"
    readme.write_text(text)
    result = call(path, "--output", tmp_path / "out", "--readme", readme)
    assert result.exit_code == 1
    assert "README.md" in result.stderr
    assert readme.read_text() == text
    assert not (tmp_path / "out").exists()


def test_readme_compares_gap_and_validation_accuracy():
    ends = {"Adam": (2, 0.9), "Untuned": (1, 0.95), "a stranger": (1, 1.0)}
    found = [make_row([4, 2], workload="nmf", method=name) for name in ends]
    for method, (loss, accuracy) in ends.items():
        row = make_row([4, loss], workload="mlp-digits", method=method)
        row["curve"]["valid_accuracy"] = [0.1, accuracy]
        found += [row, make_row([4, loss], workload="autoencoder-mnist", method=method)]
    frame = frame_of(found)
    lines = tables.readme_table(frame, {"Untuned": 1.234}).markdown().splitlines()
    assert lines[2] == "| Untuned | 1 | 2 | none | 0 | 0 | 95.0 | 1.2 |"
    assert lines[3] == "| Adam | 1 | 2 | lr, schedule | 33 | 0 | 90.0 |  |"
    assert len(lines) == 4
    gaps = tables.gap_table(frame).markdown().splitlines()
    assert gaps[2] == "| Untuned | 0 | 0 | 0 | 0 | 95.0 |"  # the last: accuracy
    table = next(t for t in tables.all_tables(frame, {}) if t.name == "validation")
    assert table.markdown().splitlines()[::3] == [
        "| method | autoencoder-mnist, loss | mlp-digits, % |",
        "| Adam | 2 | 90.0 |",
    ]


@pytest.mark.parametrize(("option", "start"), [("--json", "{"), ("--latex", r"\begin{table}")])
def test_tables_are_printed_for_other_programs(tmp_path, option, start):
    path = write_rows(tmp_path / "rows.jsonl", [*hand_made(), make_row([2, 1], method="50%_&")])
    result = call(path, "--output", tmp_path / "out", option)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(start)
    if option == "--json":
        found = json.loads(result.stdout)
        gaps = {line["method"]: line["a"] for line in found["gap"]}
        assert gaps["STORM+"] == pytest.approx(150 / 9.5)
        # README's table has none of these workloads, and would be empty.
        assert set(found) == {"gap", "scores", "validation", "results"}
    else:
        assert r"50\%\_\&" in result.stdout
        assert "tab:table" not in result.stdout


def test_names_from_outside_do_no_harm(tmp_path):
    image, script = "![i](http://evil/x.png)", "<script>alert(1)"
    found = [
        make_row([2, 1], method=method, workload=f"{script}<!-- gap:end -->")
        for method in (image, "$x$ a|b*c*", "STORM+")
    ]
    path, readme = write_rows(tmp_path / "rows.jsonl", found), tmp_path / "README.md"
    readme.write_text(PAGE)
    result = call(path, "--output", tmp_path / "out", "--readme", readme)
    assert result.exit_code == 0, result.output
    text = readme.read_text()
    assert r"| \!\[i\](http://evil/x.png) |" in text
    assert r"| \$x\$ a\|b\*c\* |" in text
    assert "<script>" not in text
    assert text.endswith("<!-- gap:end -->\n<!-- other:begin -->\n")
    assert text.count("<!-- gap:end -->") == 1
    assert script not in (tmp_path / "out" / "index.html").read_text()


def test_the_table_of_a_few_workloads_has_losses():
    table = tables.losses_table(frame_of(hand_made()))
    assert table.frame.loc["a", "SGD"].to_list() == [4, 0.5, 1, 0.5]  # the last: validation
    renamed = [row | {"method": "Untuned"} for row in hand_made() if row["method"] == "SGD"]
    assert "lr of best" not in tables.losses_table(frame_of(renamed)).frame  # has no rate


def lines(*found):
    return rows.HEADER + "\n" + "".join(json.dumps(row) + "\n" for row in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (lines(), "no runs yet"),
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


def test_an_unusable_place_or_file_is_named(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [make_row([2, 1])])
    assert call(tmp_path / "nowhere.jsonl").exit_code == 2
    assert "rows.jsonl/here" in call(path, "--output", path / "here").stderr
    assert "rows.jsonl is not an output of" in call(path, "--step-times", path).stderr


@pytest.mark.long
def test_pages_say_what_the_committed_rows_say():
    """`make report` and `make long` would change nothing."""

    def rows_of(*names):
        return read(tuple(ROOT / "docs" / "results" / f"{name}.jsonl.gz" for name in names))

    times = read_step_times(ROOT / "docs" / "results" / "step_time.json")
    found = tables.all_tables(rows_of("smooth", "networks", "untuned", "rivals"), times)
    found += tables.tuned_tables(rows_of("long", "long-held-out"))
    blocks = {table.name: table.markdown() for table in found}
    for file in (ROOT / "README.md", ROOT / "docs" / "benchmark.md"):
        assert tables.fill(file.read_text(), blocks, str(file)) == file.read_text()
