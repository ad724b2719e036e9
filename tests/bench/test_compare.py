"""`stormplus compare` end to end: rows, resuming, interruption, bad input, the table at the end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from bench_rows import frame_of, hand_made, make_row, write_rows
from click.testing import CliRunner
from rich.console import Console

from stormplus.progress import Pulse
from stormplus_bench import engine, rows
from stormplus_bench.commands.compare import compare, show, table_of
from stormplus_bench.engine import RunsFailed, announce, execute
from stormplus_bench.plan import FOLDER, BadSuite, Plan, Run, make_plan, read_suite, suites

SUITE = {
    "objective": [{"Training loss": {"seed": [0, 1]}}],
    "dataset": [{"smooth": {"problem": ["logistic-breast-cancer"], "budget": [40]}}],
    "solver": [
        {"storm-plus": {"lr": [None, 0.1], "norm": ["raw"]}},
        {"sgd": {"lr": [0.1, 1e308]}},
    ],
}


def suite(folder, **changes):
    path = folder / "mine.yml"
    path.write_text(yaml.safe_dump(SUITE | changes))
    return path


def call(*arguments):
    return CliRunner().invoke(compare, [str(a) for a in arguments])


@pytest.mark.long
def test_every_run_gives_a_row_with_all_that_is_measured(tmp_path):
    done = call(suite(tmp_path), "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "8 runs" in done.output
    assert "projected" in done.output
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()[1:]
    found = [json.loads(line) for line in lines]
    assert {(r["method"], r["lr"], r["seed"]) for r in found} == {
        (method, lr, seed)
        for method, lr in [("STORM+", 1.0), ("STORM+", 0.1), ("SGD", 0.1), ("SGD", 1e308)]
        for seed in (0, 1)
    }
    for row in found:
        curve = row["curve"]
        assert curve["evaluations"][0] == 0
        assert row["default"] == ((row["method"], row["lr"]) == ("STORM+", 1.0))
        assert row["versions"]["torch"]
        assert row["machine"]
        assert row["peak_memory_mb"] > 0
        if row["lr"] == 1e308:  # a result, not a crash
            assert row["status"] == "diverged"
            assert curve["train_loss"][-1] is None
            continue
        # Stopped by the budget, at each of the 13 checkpoints that 40 evaluations have.
        assert row["status"] == "done"
        assert curve["evaluations"][-1] == (39 if row["method"] == "STORM+" else 40)
        assert len(curve["evaluations"]) == 13
        assert curve["grad_norm"][-1] > 0
        assert curve["valid_accuracy"][-1] > 0.5
    # Logistic regression starts at 0 whatever the seed, and every method at the same iterate.
    assert len({row["curve"]["train_loss"][0] for row in found}) == 1
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


@pytest.mark.long
def test_what_is_in_the_journal_is_not_run_again(tmp_path):
    journal = tmp_path / "rows.jsonl"
    small = make_plan(SUITE | {"solver": SUITE["solver"][:1]})
    assert execute(small, journal) == 4
    before = journal.read_text()
    assert execute(small, journal) == 0
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
    path = suite(
        tmp_path,
        dataset=[{"smooth": {"problem": ["logistic-breast-cancer"], "budget": [2000]}}],
        solver=[{"sgd": {"lr": [0.01 * k for k in range(1, 8)]}}],
    )
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


def test_a_broken_journal_is_named_and_left_as_it_is(tmp_path):
    journal, text = tmp_path / "rows.jsonl", '{"format": "stormplus-rows", "version": 99}\n'
    journal.write_text(text)
    done = call(suite(tmp_path), "--output", tmp_path)
    assert done.exit_code == 1
    assert "rows.jsonl" in done.output
    assert "99" in done.output
    assert journal.read_text() == text


def test_a_dry_run_runs_nothing(tmp_path):
    done = call(suite(tmp_path), "--output", tmp_path / "o", "--dry-run")
    assert done.exit_code == 0
    assert "8 runs" in done.output
    assert not (tmp_path / "o").exists()


def test_missing_data_is_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.delenv("STORMPLUS_DATA", raising=False)
    plan = make_plan(SUITE | {"dataset": ["mnist", "shakespeare"]})
    assert plan.runs == []
    assert len(plan.skipped) == 3
    assert all("STORMPLUS_DATA" in reason for reason in plan.skipped.values())
    done = call(suite(tmp_path, dataset=["mnist"]), "--output", tmp_path)
    assert done.exit_code == 1
    assert "nothing to run" in done.output
    done = call(suite(tmp_path, dataset=["mnist"]), "--output", tmp_path, "--dry-run")
    assert done.exit_code == 1
    assert "nothing to run" in done.output


def test_a_log_shows_life(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "Pulse", partial(Pulse, every=0))
    monkeypatch.setattr(engine, "POLL", 0)
    plan = plan_of(hand_made())
    child, output = SimpleNamespace(poll=iter([None, 0]).__next__), StringIO()
    console = Console(file=output, width=100)
    engine._watch(child, plan, plan.runs, tmp_path / "rows.jsonl", console, 1)
    assert output.getvalue().count("0/2 runs, 0%, left 0:0") == 2


def test_a_run_that_was_lost_on_its_way_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "POLL", 0)
    monkeypatch.setattr(engine, "QUIET", -1e9)
    plan, journal = plan_of(hand_made()), tmp_path / "rows.jsonl"
    console, polls = Console(file=StringIO()), iter([None] * 3)
    child = SimpleNamespace(poll=polls.__next__)
    journal.with_suffix(".log").write_text("all is well")
    with pytest.raises(StopIteration):  # it goes on looking
        engine._watch(child, plan, plan.runs, journal, console, 1)
    journal.with_suffix(".log").write_text("pickle - ERROR - Failed to serialize LLGExpr")
    child.poll = iter([None]).__next__
    engine._watch(child, plan, plan.runs, journal, console, 1)


def test_runs_without_a_row_are_an_error_that_names_them(tmp_path, monkeypatch):
    plan = make_plan(SUITE)
    monkeypatch.setattr("stormplus_bench.engine.sys.executable", "/bin/false")
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


def test_what_is_not_there_is_named_and_wrong_options_are_a_usage_error(tmp_path):
    done = call("nonsense")
    assert done.exit_code == 1
    assert all(name in done.output for name in suites())
    done = call(suite(tmp_path, solver=["nonsense"]))
    assert done.exit_code != 0
    assert "nonsense" in done.output
    assert call("--jobs", "0").exit_code == call("--threads", "0").exit_code == 2
    text = " ".join(call("--help").output.split())
    assert "130 interrupted" in text
    assert "Runs side by side. [default: 1; x>=1]" in text
    assert "[out/SUITE]" in text
    listed = call("--list").output
    assert all(name in listed for name in ("quick", "smooth", "networks", "untuned"))


def test_another_budget_is_another_workload():
    datasets = [{"smooth": {"problem": ["nmf"], "budget": [budget]}} for budget in (None, 1500, 60)]
    names = {make_plan(SUITE | {"dataset": [d]}).runs[0].workload for d in datasets}
    assert names == {"nmf", "nmf (60 evaluations)"}


def test_the_suites_that_ship_are_whole(monkeypatch):
    monkeypatch.delenv("STORMPLUS_DATA", raising=False)
    plan = make_plan(read_suite("smooth"))
    # 7 workloads, 3 seeds, 8 rates, 19 methods; two defaults are off the grid; one has no rate.
    assert len(plan.runs) == 7 * 3 * (8 * 19 + 2 + 1)
    assert len({run.key for run in plan.runs}) == len(plan.runs)
    for name in ("smooth", "networks", "untuned"):
        solvers = [next(iter(s)) if isinstance(s, dict) else s for s in read_suite(name)["solver"]]
        assert "untuned" in solvers


@pytest.mark.long
def test_benchopts_own_checks_pass(tmp_path):
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "benchopt", "test", str(FOLDER), "--skip-env"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.long
def test_two_dask_workers_give_the_rows_of_a_sequential_run(tmp_path):
    plan = make_plan(read_suite("quick"))
    alone, dask = tmp_path / "alone.jsonl", tmp_path / "dask.jsonl"
    config = Path(__file__).parents[2] / "benchmark" / "parallel" / "dask.yml"
    execute(plan, alone)
    execute(plan, dask, parallel_config=config)
    assert "Distributed run with backend: dask" in dask.with_suffix(".log").read_text()
    changing = ["seconds", "peak_memory_mb"]  # the clock, and what else a worker holds
    keys = [*rows.KEY, "evaluations"]
    frames = [
        rows.load(path).drop(columns=changing).sort_values(keys).reset_index(drop=True)
        for path in (alone, dask)
    ]
    assert len(frames[0]) > 200
    assert frames[0].equals(frames[1])


def printed(*things, width=100):
    output = StringIO()
    Console(file=output, width=width).print(*things)
    return output.getvalue()


def test_a_few_workloads_are_shown_by_their_losses():
    table = table_of(frame_of(hand_made()))
    text = printed(table)
    assert "final training loss" in text
    # SGD on a, at its default and at its best; Adam diverges there.
    cells = [line.strip("│ ").split() for line in text.replace("│", " ").splitlines()]
    assert ["SGD", "4", "0.5", "1"] in cells
    assert ["Adam", "diverged", "diverged"] in cells
    assert "…" not in printed(table, width=60)
    assert "(median over seeds)" in text
    one = frame_of(row for row in hand_made() if row["seed"] == 0)
    assert "seeds" not in printed(table_of(one))


def test_a_method_that_needs_no_rate_is_shown_without_one():
    renamed = [row | {"method": "Untuned"} for row in hand_made() if row["method"] == "SGD"]
    text = printed(table_of(frame_of(renamed)))
    cells = [line.strip("│ ").split() for line in text.replace("│", " ").splitlines()]
    assert ["Untuned", "4", "0.5"] in cells


def test_many_workloads_fit_a_terminal():
    methods = ("STORM+ mean", "simplified STORM+", "SGD momentum")
    names = [(f"workload-{k}", method) for k in range(12) for method in methods]
    frame = frame_of(make_row([2, 1, 0.9], workload=w, method=m) for w, m in names)
    text = printed(table_of(frame))
    for part in ("12 workloads", "simplified STORM+", "1.00"):
        assert part in text
    assert "…" not in text


def plan_of(found):
    runs = [Run(w, "SGD", 0.1, 0, 100) for w in sorted({row["workload"] for row in found})]
    return Plan({}, runs, {}, dict.fromkeys([run.workload for run in runs], 1.2))


def test_with_other_workers_the_number_at_a_time_is_not_made_up(tmp_path):
    output = StringIO()
    for jobs in (2, None):
        console = Console(file=output, width=200)
        announce(plan_of(hand_made()), tmp_path / "[new] none.jsonl", jobs, console)
    one, other, first, *_, second = output.getvalue().splitlines()
    for line in (one, other):  # what a workload takes on one core
        assert line.endswith(": 1 runs of 100 gradients of 1.2e+03 ms, 2.0 minutes")
    assert "[new] none.jsonl" in first
    assert "projected: 2.0 minutes for the other 2, 2 at a time" in first
    assert "projected: 4.0 minutes for the other 2, divided by the number of workers" in second


def test_a_line_that_another_suite_left_halfway_is_not_in_the_way(tmp_path):
    journal, output = write_rows(tmp_path / "rows.jsonl", hand_made()), StringIO()
    with journal.open("a") as file:
        file.write('{"workload": "other", "met')
    show(journal, plan_of(hand_made()), tmp_path, Console(file=output, width=120))
    assert "curves.png" in output.getvalue()
