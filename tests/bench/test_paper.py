"""The paper's experiment: what is run next, what is said of it, and the files it writes."""

import importlib.util
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("benchopt")

from paper_rows import SCALE, TWO_GRADIENTS, journal_of, long_frame, run, sweep_runs

from stormplus.bench import paper_command, rows
from stormplus.bench.paper_command import paper
from stormplus.bench.paper_figure import figure
from stormplus.bench.paper_plan import SCALES, SOLVERS, Scale, extension, long_runs
from stormplus.bench.paper_report import report, write
from stormplus.bench.plan import Plan


def test_a_best_rate_inside_its_range_extends_nothing(tmp_path):
    frame = rows.load(journal_of(tmp_path / "r", sweep_runs(dict.fromkeys(SOLVERS, 0.1))))
    assert extension(SCALE, frame) is None
    chosen = long_runs(SCALE, frame)
    assert chosen["dataset"] == [{"paper": {"images": [1000], "budget": [40]}}]
    assert all(0.1 in next(iter(s.values()))["lr"] for s in chosen["solver"])
    assert len(chosen["solver"]) == len(SOLVERS)


def test_a_best_rate_at_an_end_extends_that_end_and_only_so_often(tmp_path):
    best = dict.fromkeys(SOLVERS, 0.1) | {"Adam": 0.01, "STORM+": 1.0}
    journal = journal_of(tmp_path / "r", sweep_runs(best))
    more = extension(SCALE, rows.load(journal))
    assert more["solver"] == [
        {"adam": {"lr": [0.00316]}},
        {"storm-plus": {"lr": [3.16], "norm": ["raw"]}},
    ]
    rates, losses = [0.00316, 0.001, 0.000316], [0.9, 0.8, 0.7]  # better at every extension
    for lr, loss in zip(rates, losses, strict=True):
        rows.append(journal, run(SCALE.sweep_name, "Adam", lr, [3.0, loss]))
    again = extension(SCALE, rows.load(journal))
    assert [next(iter(s)) for s in again["solver"]] == ["storm-plus"]


def test_rates_beyond_the_range_have_three_digits_and_no_rounding_on_top(tmp_path):
    wide = Scale(1000, 20, 1000, 40, rates=(0.000316, 0.001))
    runs = [run(wide.sweep_name, "Adam", lr, [3.0, lr]) for lr in wide.rates]
    more = extension(wide, rows.load(journal_of(tmp_path / "r", runs)))
    assert more["solver"] == [{"adam": {"lr": [0.0001]}}]  # not 0.0000999


def test_a_method_that_always_diverges_does_not_extend(tmp_path):
    runs = [run(SCALE.sweep_name, "Adam", lr, [3.0, None]) for lr in SCALE.rates]
    assert extension(SCALE, rows.load(journal_of(tmp_path / "r", runs))) is None


def test_the_files_are_written_from_the_rows(tmp_path):
    journal = journal_of(tmp_path / "rows.jsonl", sweep_runs(dict.fromkeys(SOLVERS, 0.1)))
    assert [f.name for f in write(journal, SCALE, tmp_path)] == ["sweep.png", "paper.md"]
    text = (tmp_path / "paper.md").read_text()
    assert "not complete" in text
    assert "| Adam | 2.000 | **1.000** | 2.000 |" in text
    for m in SOLVERS:
        price = 2 if m in TWO_GRADIENTS else 1
        rows.append(journal, run(SCALE.long_name, m, 0.1, [3.0, 2.0, 1.0], price=price))
    assert [f.name for f in write(journal, SCALE, tmp_path)] == [
        "sweep.png",
        "paper.png",
        "paper.md",
    ]
    text = (tmp_path / "paper.md").read_text()
    assert "| STORM+ | 0.1 | 2.00 | 40 | 1.000" in text  # 20 samples of 100 in 1000 images
    assert text.count("STORM and STORM+ are quite close") == 4  # two axes, two forms of ours


def test_the_sweep_says_who_diverged_and_writes_large_numbers_short(tmp_path):
    runs = sweep_runs(dict.fromkeys(SOLVERS, 0.1))
    runs += [
        run(SCALE.sweep_name, "Adam", 1.0, [3.0, None]),
        run(SCALE.sweep_name, "AdaGrad", 1.0, [3.0, 24456207.0]),
    ]
    _, text = report(rows.load(journal_of(tmp_path / "r", runs)), SCALE)
    assert "| Adam | 2.000 | **1.000** | diverged |" in text
    assert "| AdaGrad | 2.000 | **1.000** | 2.4e+07 |" in text


def test_a_transient_does_not_press_the_curves_into_one_line(tmp_path):
    losses = {m: [2.0, 1.5, 1.0] for m in SOLVERS} | {"STORM+ mean": [2.0, 15000.0, 1.0]}
    frame = long_frame(tmp_path, losses, {m: [0.1, 0.2, 0.3] for m in SOLVERS})
    drawn = figure(frame, dict.fromkeys(SOLVERS, 0.1))
    loss, _, accuracy, _ = drawn.axes[:4]
    assert loss.get_ylim()[1] == 3.0  # 1.5 times the first one
    assert loss.get_ylim()[0] < 1.0
    assert accuracy.get_ylim()[1] < 0.5
    assert "1.5 times the first" in drawn.legends[0].get_title().get_text()


def test_a_line_cut_in_the_last_stage_is_run_again_and_not_in_the_way(tmp_path, monkeypatch):
    journal = journal_of(tmp_path / "rows.jsonl", sweep_runs(dict.fromkeys(SOLVERS, 0.1)))
    for m in SOLVERS:
        rows.append(journal, run(SCALE.long_name, m, 0.1, [3.0, 2.0, 1.0]))
    journal.write_bytes(journal.read_bytes()[:-40])
    stages = []
    monkeypatch.setattr(
        paper_command, "make_plan", lambda config, _threads: Plan(config, [], {}, {"w": 60})
    )
    monkeypatch.setattr(paper_command, "execute", lambda plan, *_, **__: stages.append(plan.config))
    output = StringIO()
    paper_command.run_stages(SCALE, journal, 1, 1, Console(file=output))
    assert len(stages) == 2
    # The one that was cut: 40 evaluations of a minute.
    assert "then the long runs: 40.0 minutes" in output.getvalue()


def test_without_the_data_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.delenv("STORMPLUS_DATA", raising=False)
    done = CliRunner().invoke(paper, ["--scale", "smoke", "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "stormplus data cifar10" in done.output


def test_nothing_to_redraw_is_explained(tmp_path):
    done = CliRunner().invoke(paper, ["--redraw", "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "rows.jsonl" in done.output


def test_the_help_teaches():
    done = CliRunner().invoke(paper, ["--help"])
    assert all(name in done.output for name in SCALES)
    assert "goes on" in done.output


@pytest.mark.long
@pytest.mark.skipif("STORMPLUS_DATA" not in os.environ, reason="STORMPLUS_DATA is not set")
def test_the_smallest_scale_runs_resnet34_and_resumes(tmp_path):
    command = [sys.executable, "-m", "stormplus", "paper", "--scale", "smoke", "--jobs", "2"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(x) for x in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    assert {r["method"] for r in found} == set(SOLVERS)
    assert (tmp_path / "paper.png").exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "projected: 0.0 minutes for the other 0" in again.stdout


@pytest.mark.long
def test_the_page_says_what_the_rows_say(tmp_path, monkeypatch):
    """The committed tables are those that `make paper-page` writes."""
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("page", root / "benchmark" / "paper_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (root / "docs" / "paper-experiment.md").read_text()
    (tmp_path / "figures").mkdir()
    (tmp_path / "paper-experiment.md").write_text(page)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "ROWS", root / module.ROWS)
    module.main()
    assert (tmp_path / "paper-experiment.md").read_text() == page
    assert {f.name for f in (tmp_path / "figures").iterdir()} == set(module.FIGURES.values())
