"""The benchmark's own plots, through benchopt's machinery."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("benchopt")
pytest.importorskip("pandas")

from bench_rows import frame_of, hand_made

from stormplus.bench import rows

FOLDER = Path(__file__).parents[2] / "benchmark" / "plots"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_plot_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plot = module.Plot.get_instance()
    plot._check()
    return plot


@pytest.fixture
def frame(tmp_path):
    """As benchopt has it: the status is the one at the point, so only the last is diverged."""
    frame = frame_of(tmp_path, hand_made())
    names = {name: f"objective_{name}" for name in rows.COLUMNS}
    names |= {"train_loss": "objective_value", "seconds": "time"}
    last = frame.groupby(list(rows.KEY))["evaluations"].transform("max") == frame["evaluations"]
    frame["status"] = frame["status"].where(last, "done")
    return frame.drop(columns=["versions", "machine"]).rename(columns=names)


def check_json(plot, frame):
    plots, _ = plot._get_all_plots(frame)
    json.dumps(plots, allow_nan=False)  # what benchopt writes into its page


def test_every_plot_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *("sensitivity", "cost_of_not_tuning", "performance_profile", "all_results"),
    }


def test_benchopt_finds_and_draws_them(benchmark, frame):
    ours = {"learning_rate_sensitivity", "cost_of_not_tuning", "performance_profile", "all_results"}
    assert ours <= set(benchmark.get_plot_names())
    data, options = benchmark.get_plot_data(frame, ours)
    assert set(data) == ours
    assert options["cost_of_not_tuning"] == {"workload": ["mean over workloads", "a", "b"]}


def test_sensitivity(frame):
    plot = load("sensitivity")
    lines = plot.plot(frame, workload="a", measure="final training loss")
    # Adam diverged.
    assert [line["label"] for line in lines] == ["STORM+", "SGD"]
    assert lines[0]["x"] == [1, 10]
    assert lines[0]["y"] == [2, 6]
    assert lines[0]["y_low"] == [1, 6]
    check_json(plot, frame)


def test_cost_of_not_tuning(frame):
    plot = load("cost_of_not_tuning")
    bars = plot.plot(frame, workload="a")
    assert [(bar["label"], bar["text"]) for bar in bars] == [
        ("STORM+", "16"),
        ("SGD", "37"),
        ("Adam", "div."),
    ]
    assert bars[0]["y"] == pytest.approx([150 / 9.5])
    mean = plot.plot(frame, workload="mean over workloads")
    assert [bar["label"] for bar in mean] == ["SGD", "STORM+", "Adam"]
    part = frame[(frame["objective_method"] != "SGD") | (frame["objective_workload"] == "a")]
    labels = [bar["label"] for bar in plot.plot(part, workload="mean over workloads")]
    assert labels == ["STORM+", "Adam", "SGD (1 of 2 workloads)"]
    check_json(plot, frame)


def test_performance_profile(frame):
    plot = load("performance_profile")
    lines = {line["label"].split(" ", 1)[1]: line for line in plot.plot(frame, lr="best")}
    # Only SGD and STORM+ ran several lr, on a. Adam, the one classic, is never below the start
    # there, so that both reach the target at once.
    assert set(lines) == {"SGD", "STORM+"}
    assert lines["SGD"]["label"] == "1.00 SGD"
    assert "one learning rate are left out" in plot.get_metadata(frame, lr="best")["title"]
    lines = {line["label"].split(" ", 1)[1]: line for line in plot.plot(frame, lr="default")}
    # The same on a. b: Adam has 5.25 or more at 25 and 50, so the target is the start, 2.
    assert lines["STORM+"]["x"] == [1, 4, 4]
    assert lines["STORM+"]["y"] == [1, 1, 1]
    assert lines["Adam"]["y"] == [0, 0, 0]
    assert "left out" not in plot.get_metadata(frame, lr="default")["title"]
    check_json(plot, frame)


def test_all_results(frame):
    plot = load("all_results")
    table = plot.plot(frame)
    columns = plot.get_metadata(frame)["columns"]
    assert len(table) == 6
    assert all(len(line) == len(columns) for line in table)
    assert table[0][:3] == ["a", "Adam", "inf"]
    assert [line[-2:] for line in table[:3]] == [[1, "no"], [2, "yes"], [2, "yes"]]
    check_json(plot, frame)
