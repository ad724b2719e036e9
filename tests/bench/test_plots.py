"""The benchmark's own plots, through benchopt's machinery."""

import importlib.util
import json

import pytest
from bench_rows import frame_of, hand_made
from benchopt.benchmark import Benchmark

from stormplus_bench import rows
from stormplus_bench.plan import FOLDER


def load(name):
    path = FOLDER / "plots" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_plot_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plot = module.Plot.get_instance()
    plot._check()
    return plot


@pytest.fixture(scope="module")
def frame():
    """As benchopt has it: the status is the one of the moment, so only the last is diverged."""
    frame = frame_of(hand_made())
    names = {name: f"objective_{name}" for name in rows.COLUMNS}
    names |= {"train_loss": "objective_value", "seconds": "time"}
    last = frame.groupby(list(rows.KEY))["evaluations"].transform("max") == frame["evaluations"]
    frame["status"] = frame["status"].where(last, "done")
    return frame.drop(columns=["versions", "machine"]).rename(columns=names)


@pytest.mark.long
def test_benchopt_finds_and_draws_them(frame):
    ours = {"learning_rate_sensitivity", "cost_of_not_tuning", "performance_profile", "all_results"}
    benchmark = Benchmark(FOLDER, no_cache=True)
    assert ours <= set(benchmark.get_plot_names())
    data, options = benchmark.get_plot_data(frame, ours)
    assert set(data) == ours
    assert options["cost_of_not_tuning"] == {"workload": ["mean over workloads", "a", "b"]}
    for path in (FOLDER / "plots").glob("*.py"):
        plots, _ = load(path.stem)._get_all_plots(frame)
        json.dumps(plots, allow_nan=False)  # what benchopt writes into its page


def test_sensitivity_and_cost_of_not_tuning(frame):
    lines = load("sensitivity").plot(frame, workload="a", measure="final training loss")
    assert [line["label"] for line in lines] == ["STORM+", "SGD"]  # Adam diverged
    assert [lines[0][name] for name in ("x", "y", "y_low")] == [[1, 10], [2, 6], [1, 6]]
    plot = load("cost_of_not_tuning")
    bars = plot.plot(frame, workload="a")
    found = [(bar["label"], bar["text"]) for bar in bars]
    assert found == [("STORM+", "16"), ("SGD", "37"), ("Adam", "div.")]
    assert bars[0]["y"] == pytest.approx([150 / 9.5])
    mean = plot.plot(frame, workload="mean over workloads")
    assert [bar["label"] for bar in mean] == ["SGD", "STORM+", "Adam"]
    part = frame[(frame["objective_method"] != "SGD") | (frame["objective_workload"] == "a")]
    labels = [bar["label"] for bar in plot.plot(part, workload="mean over workloads")]
    assert labels == ["STORM+", "Adam", "SGD (1 of 2 workloads)"]


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


def test_all_results(frame):
    plot = load("all_results")
    table, columns = plot.plot(frame), plot.get_metadata(frame)["columns"]
    assert [len(line) for line in table] == [len(columns)] * 6
    assert table[0][:3] == ["a", "Adam", "inf"]
    assert [line[-2:] for line in table[:3]] == [[1, "no"], [2, "yes"], [2, "yes"]]
