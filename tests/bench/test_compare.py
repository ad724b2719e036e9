"""The command end to end: rows, resuming, interruption, bad input."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from click.testing import CliRunner

pytest.importorskip("benchopt")

from stormplus.bench import rows
from stormplus.bench.compare_command import compare
from stormplus.bench.engine import RunsFailed, execute
from stormplus.bench.plan import BadSuite, make_plan, read_suite, suites

SUITE = {
    "objective": [{"Training loss": {"seed": [0, 1]}}],
    "dataset": [{"smooth": {"problem": ["logistic-breast-cancer"], "budget": [40]}}],
    "solver": [
        {"storm-plus": {"lr": [None, 0.1], "norm": ["raw"]}},
        {"sgd": {"lr": [0.1, 1e308]}},
    ],
}


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(SUITE))
    return path


def runs_of(journal):
    return [json.loads(line) for line in journal.read_text().splitlines()[1:]]


def test_every_run_gives_a_row_with_all_that_is_measured(suite, tmp_path):
    done = CliRunner().invoke(compare, [str(suite), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "8 runs" in done.output
    assert "projected" in done.output
    found = runs_of(tmp_path / "out" / "rows.jsonl")
    keys = {(r["method"], r["lr"], r["seed"]) for r in found}
    assert keys == {
        (method, lr, seed)
        for method, lr in [("STORM+", 1.0), ("STORM+", 0.1), ("SGD", 0.1), ("SGD", 1e308)]
        for seed in (0, 1)
    }
    for run in found:
        curve = run["curve"]
        assert curve["evaluations"][0] == 0
        assert run["default"] == ((run["method"], run["lr"]) == ("STORM+", 1.0))
        assert run["versions"]["torch"]
        assert run["machine"]
        assert run["peak_memory_mb"] > 0
        if run["lr"] == 1e308:  # a result, not a crash
            assert run["status"] == "diverged"
            assert curve["train_loss"][-1] is None
            continue
        # Stopped by the budget, at each of the 13 checkpoints that 40 evaluations have.
        assert run["status"] == "done"
        assert curve["evaluations"][-1] == (39 if run["method"] == "STORM+" else 40)
        assert len(curve["evaluations"]) == 13
        assert curve["grad_norm"][-1] > 0
        assert curve["valid_accuracy"][-1] > 0.5
    # Logistic regression starts at 0 whatever the seed, and every method at the same point.
    assert len({run["curve"]["train_loss"][0] for run in found}) == 1
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


@pytest.mark.long
def test_what_is_in_the_journal_is_not_run_again(tmp_path):
    journal = tmp_path / "rows.jsonl"
    small = SUITE | {"solver": SUITE["solver"][:1]}
    assert execute(make_plan(small), journal) == 4
    before = journal.read_text()
    assert execute(make_plan(small), journal) == 0
    assert execute(make_plan(SUITE), journal) == 4
    assert journal.read_text().startswith(before)
    assert len(rows.keys(journal)) == 8


def wait_for_rows(journal, count, child):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if journal.exists() and len(rows.keys(journal)) >= count:
            return
        assert child.poll() is None, child.communicate()
        time.sleep(0.1)
    raise AssertionError("no rows in two minutes")


@pytest.mark.long
@pytest.mark.parametrize(
    "sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "term", "kill"]
)
def test_an_interruption_loses_nothing_that_was_done(tmp_path, sign):
    slow = SUITE | {
        "dataset": [{"smooth": {"problem": ["logistic-breast-cancer"], "budget": [2000]}}],
        "solver": [{"sgd": {"lr": [0.01 * k for k in range(1, 8)]}}],
    }
    path = tmp_path / "slow.yml"
    path.write_text(yaml.safe_dump(slow))
    command = [sys.executable, "-m", "stormplus", "compare", str(path), "--output", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    journal = tmp_path / "rows.jsonl"
    wait_for_rows(journal, 2, child)
    below = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(sign)
    output = child.communicate(timeout=60)[0]
    if sign == signal.SIGKILL:  # benchopt outlives it: a second one must not start beside it
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 1
        assert "another run is writing" in refused.stderr
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=30)
    else:
        assert child.returncode == 130
        assert "the same command goes on" in output
        assert not psutil.wait_procs(below, timeout=30)[1]  # nothing is left running
    kept = rows.keys(journal)
    assert 2 <= len(kept) < 14
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{len(kept)} of them already in" in again.stdout
    assert len(rows.keys(journal)) == 14


def test_a_broken_journal_is_named_and_left_as_it_is(suite, tmp_path):
    journal = tmp_path / "out" / "rows.jsonl"
    journal.parent.mkdir()
    journal.write_text('{"format": "stormplus-rows", "version": 99}\n')
    done = CliRunner().invoke(compare, [str(suite), "--output", str(journal.parent)])
    assert done.exit_code == 1
    assert "rows.jsonl" in done.output
    assert "99" in done.output
    assert journal.read_text() == '{"format": "stormplus-rows", "version": 99}\n'


def test_a_dry_run_runs_nothing(suite, tmp_path):
    done = CliRunner().invoke(compare, [str(suite), "--output", str(tmp_path / "o"), "--dry-run"])
    assert done.exit_code == 0
    assert "8 runs" in done.output
    assert not (tmp_path / "o").exists()


def test_missing_data_is_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.delenv("STORMPLUS_DATA", raising=False)
    plan = make_plan(SUITE | {"dataset": ["mnist", "shakespeare"]})
    assert plan.runs == []
    assert len(plan.skipped) == 3
    assert all("STORMPLUS_DATA" in reason for reason in plan.skipped.values())
    path = tmp_path / "s.yml"
    path.write_text(yaml.safe_dump(SUITE | {"dataset": ["mnist"]}))
    done = CliRunner().invoke(compare, [str(path), "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "nothing to run" in done.output


def test_runs_without_a_row_are_an_error_that_names_them(tmp_path, monkeypatch):
    plan = make_plan(SUITE)
    monkeypatch.setattr("stormplus.bench.engine.sys.executable", "/bin/false")
    with pytest.raises(RunsFailed, match=r"8 of 8 runs gave no row.*STORM\+"):
        execute(plan, tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: [", "not YAML"),
        ("- 1", "should have the keys"),
        ("dataset: [smooth]", "keys"),
        ("{dataset: [smooth], solver: [sgd], timeout: 3}", "timeout would be ignored"),
    ],
)
def test_a_bad_suite_is_explained(tmp_path, text, message):
    path = tmp_path / "bad.yml"
    path.write_text(text)
    with pytest.raises(BadSuite, match=message):
        read_suite(str(path))


def test_another_budget_is_another_workload():
    names = {
        make_plan(SUITE | {"dataset": [{"smooth": {"problem": ["nmf"], "budget": [budget]}}]})
        .runs[0]
        .workload
        for budget in (None, 1500, 60)
    }
    assert names == {"nmf", "nmf (60 evaluations)"}


@pytest.mark.parametrize("option", ["--jobs", "--threads"])
def test_less_than_one_worker_is_a_usage_error(option):
    assert CliRunner().invoke(compare, [option, "0"]).exit_code == 2


def test_an_unknown_suite_names_those_there_are():
    done = CliRunner().invoke(compare, ["nonsense"])
    assert done.exit_code == 1
    assert all(name in done.output for name in suites())


def test_an_unknown_solver_is_explained(tmp_path):
    path = tmp_path / "s.yml"
    path.write_text(yaml.safe_dump(SUITE | {"solver": ["nonsense"]}))
    done = CliRunner().invoke(compare, [str(path)])
    assert done.exit_code != 0
    assert "nonsense" in done.output


def test_the_suites_that_ship_are_whole(monkeypatch):
    monkeypatch.delenv("STORMPLUS_DATA", raising=False)
    assert {"quick", "smooth", "networks"} <= set(suites())
    plan = make_plan(read_suite("smooth"))
    # 7 workloads, 3 seeds, 8 rates, 20 methods; two defaults are off the grid.
    assert len(plan.runs) == 7 * 3 * (8 * 20 + 2)
    assert len({run.key for run in plan.runs}) == len(plan.runs)


@pytest.mark.long
def test_benchopts_own_checks_pass(tmp_path):
    folder = Path(__file__).parents[2] / "benchmark"
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "benchopt", "test", str(folder), "--skip-env"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.long
def test_two_dask_workers_give_the_rows_of_a_sequential_run(tmp_path):
    pytest.importorskip("dask.distributed")
    folder = Path(__file__).parents[2] / "benchmark"
    plan = make_plan(read_suite("quick"))
    alone, dask = tmp_path / "alone.jsonl", tmp_path / "dask.jsonl"
    execute(plan, alone)
    execute(plan, dask, parallel_config=folder / "parallel" / "dask.yml")
    assert "Distributed run with backend: dask" in dask.with_suffix(".log").read_text()
    changing = ("seconds", "peak_memory_mb")  # the clock, and what else a worker holds
    keys = ["workload", "method", "lr", "seed", "evaluations"]
    frames = [
        rows.load(path).drop(columns=list(changing)).sort_values(keys).reset_index(drop=True)
        for path in (alone, dask)
    ]
    assert len(frames[0]) > 200
    assert frames[0].equals(frames[1])
