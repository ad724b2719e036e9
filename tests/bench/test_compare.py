"""`stormplus compare` end to end: rows, resuming, interruption, bad input, the final table."""

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

from stormplus_bench import rows
from stormplus_bench.commands.compare import compare
from stormplus_bench.engine import execute
from stormplus_bench.interrupts import RunsFailed
from stormplus_bench.own import TEMPLATES
from stormplus_bench.plan import FOLDER, make_plan, read_suite, with_own

SUITE = {
    "objective": [{"Training loss": {"seed": [0, 1]}}],
    "dataset": [{"smooth": {"problem": ["logistic-breast-cancer"], "budget": [40]}}],
    "solver": [{"storm-plus": {"lr": [None, 0.1]}}, {"sgd": {"lr": [0.1, 1e308]}}],
}


def suite(folder, **changes):
    path = folder / "mine.yml"
    path.write_text(yaml.safe_dump(SUITE | changes))
    return path


def call(*arguments):
    return CliRunner().invoke(compare, [str(a) for a in arguments])


@pytest.mark.long
def test_every_run_gives_a_row_and_is_not_repeated(tmp_path):
    done = call(suite(tmp_path), "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "8 runs, 0 of them already in" in done.stderr
    journal = tmp_path / "out" / "rows.jsonl"
    found = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    methods = [("STORM+", 1.0), ("STORM+", 0.1), ("SGD", 0.1), ("SGD", 1e308)]
    assert {(r["method"], r["lr"], r["seed"]) for r in found} == {
        (method, lr, seed) for method, lr in methods for seed in (0, 1)
    }
    for row in found:
        curve = row["curve"]
        assert row["default"] == ((row["method"], row["lr"]) == ("STORM+", 1.0))
        assert row["versions"]["torch"]
        if row["lr"] == 1e308:  # a result, not an error
            assert (row["status"], curve["train_loss"][-1]) == ("diverged", None)
            continue
        # Stopped by the budget, at each of the 13 checkpoints of 40 evaluations.
        assert row["status"] == "done"
        assert curve["evaluations"][-1] == (39 if row["method"] == "STORM+" else 40)
        assert len(curve["evaluations"]) == 13
        assert curve["grad_norm"][-1] > 0
        assert curve["valid_accuracy"][-1] > 0.5
    assert len({row["curve"]["train_loss"][0] for row in found}) == 1  # the same start
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    before = journal.read_text()
    again = call(suite(tmp_path), "--output", tmp_path / "out", "--json")
    assert f"8 runs, 8 of them already in {journal}" in again.stderr
    assert journal.read_text() == before
    assert {line["method"] for line in json.loads(again.stdout)["losses"]} == {"STORM+", "SGD"}


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interruption_keeps_finished_runs(tmp_path, sign):
    path = suite(
        tmp_path,
        dataset=[{"smooth": {"problem": ["logistic-breast-cancer"], "budget": [2000]}}],
        solver=[{"sgd": {"lr": [0.01 * k for k in range(1, 8)]}}],
    )
    command = [sys.executable, "-m", "stormplus_bench.cli", "compare", str(path)]
    command += ["--output", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    journal, deadline = tmp_path / "rows.jsonl", time.monotonic() + 300
    while not (journal.exists() and len(rows.keys(journal)) >= 2):
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    below = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(sign)
    output = child.communicate(timeout=60)[0]
    if sign == signal.SIGKILL:  # benchopt survives it
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    else:
        assert child.returncode == 130
        assert "repeat the command to continue" in output
    assert not psutil.wait_procs(below, timeout=30)[1]
    kept = rows.keys(journal)
    assert 2 <= len(kept) < 14
    again = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(rows.keys(journal)) == 14


FRAMES = '  File "/lib/a.py", line 1\n  File "{0}", line 7\n  File "/lib/b.py", line 2\n'


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("a\n\x1b[31mTraceback\x1b[0m\nModuleNotFoundError: no submitit\nb", "no submitit"),
        (FRAMES + "pkg.SomeError: bad", r"solver\.py, line 7: pkg\.SomeError: bad"),
        ("killed", "killed"),
    ],
)
def test_runs_without_a_row_are_an_error_with_benchopts_message(
    tmp_path, monkeypatch, output, found
):
    program, mine = tmp_path / "program", TEMPLATES / "solver.py"
    program.write_text(f"#!/bin/sh\nprintf '{output.format(mine)}'\n")
    program.chmod(0o755)
    monkeypatch.setattr("stormplus_bench.engine.sys.executable", str(program))
    plan = make_plan(with_own(SUITE, [mine], alone=True))
    with pytest.raises(RunsFailed, match=rf"4 of 4 runs failed, first Mine on .*\n.*{found}\n"):
        execute(plan, tmp_path / "rows.jsonl")


def test_a_dry_run_runs_nothing_and_a_method_can_be_chosen(tmp_path):
    path, out = suite(tmp_path), ("--output", tmp_path / "o", "--dry-run")
    assert "8 runs, 0 of them" in call(path, *out).stderr
    for name in ("sgd", "storm-plus", "STORM+"):
        assert "4 runs, 0 of them" in call(path, *out, "--method", name).stderr
    wrong = call(path, *out, "--method", "Sgb")
    assert wrong.exit_code == 1
    assert "no method 'Sgb', did you mean 'SGD'?" in wrong.stderr
    assert not (tmp_path / "o").exists()


def test_missing_data_is_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("STORMPLUS_DATA", str(tmp_path / "none"))
    done = call(suite(tmp_path, dataset=["mnist", "shakespeare"]), "--output", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.count("run `stormplus data ") == 3
    assert "nothing to run" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: [", "not YAML"),
        ("- 1", "should have the keys"),
        ("dataset: [smooth]", "keys"),
        ("{dataset: [smooth], solver: [sgd], timeout: 3}", "timeout would be ignored"),
        ("{dataset: [smooth], solver: }", "solver should be a list that is not empty, got None"),
        ("[" * 10_000, "not YAML"),
    ],
)
def test_a_bad_suite_is_explained(tmp_path, text, message):
    path = tmp_path / "bad.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_suite(str(path))


def test_wrong_names_and_options(tmp_path):
    done = call("quik")
    assert done.exit_code == 1
    assert "no suite 'quik', did you mean 'quick'?" in done.output
    assert "nonsense" in call(suite(tmp_path, solver=["nonsense"])).output
    assert call("--jobs", "0").exit_code == call("quick", "--alone").exit_code == 2
    listed = call("--list").output
    assert all(name in listed for name in ("quick", "smooth", "networks", "untuned"))


def test_another_budget_is_another_workload():
    datasets = [{"smooth": {"problem": ["nmf"], "budget": [budget]}} for budget in (None, 1500, 60)]
    names = {make_plan(SUITE | {"dataset": [d]}).runs[0].workload for d in datasets}
    assert names == {"nmf", "nmf (60 evaluations)"}


@pytest.mark.long
def test_benchopts_own_checks_pass(tmp_path):
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "benchopt", "test", str(FOLDER), "--skip-env"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
