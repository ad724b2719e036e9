"""`stormplus rates` goes on where it was left, can be stopped, and says what is wrong."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from stormplus.cli import main
from stormplus.theory.rates import METHODS, Plan, Result, figure
from stormplus.theory.rates.command import rates
from stormplus.theory.rates.store import load, part, read, save, write_whole
from stormplus.theory.rates.workers import MethodFailed, run_all

TINY = Plan(
    steps=400,
    seeds=(0, 1),
    sigmas=(0.0, 0.1, 1.0),
    window=(100, 400),
    tuning_steps=20,
    tuning_seeds=(1000,),
)
TUNES_FOR_HOURS = dataclasses.replace(TINY, tuning_steps=10**9)


def made_up(name, plan=TINY):
    """A result no run gives: where it is found, no run was made."""
    shape = (len(plan.checkpoints), len(plan.sigmas), len(plan.seeds))
    numbers = np.random.default_rng(7).uniform(0.1, 1, shape)
    return Result(name, numbers, numbers**2, 1234.5, {}, {"numpy": "0.0"})


@pytest.fixture(autouse=True)
def blank(monkeypatch):
    """No drawing, which takes longer than all the rest and is tested elsewhere."""
    monkeypatch.setattr(figure, "draw", lambda *_: figure.Figure((1, 1)))


def stamp(name, folder):
    """Changes when the file is written again, even with the same content."""
    told = part(folder, name).stat()
    return told.st_ino, told.st_mtime_ns


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command with the tiny plan, in a folder of its own."""
    monkeypatch.setattr(Plan, "quick", lambda: TINY)

    def invoke(*arguments):
        given = ["rates", "--output", str(tmp_path), *arguments]
        return CliRunner().invoke(main, given, catch_exceptions=False)

    return invoke


def refused(done, *texts):
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert all(text in done.stderr for text in texts), done.stderr


def test_a_finished_method_is_not_run_again(command, tmp_path):
    save(made_up("storm+"), TINY, tmp_path)
    before = stamp("storm+", tmp_path)
    done = command("--quick", "--method", "storm+", "--method", "adagrad-norm")
    assert done.exit_code == 0
    assert "to run: adagrad-norm; already in" in done.output
    assert stamp("storm+", tmp_path) == before
    summary = json.loads((tmp_path / "rates_summary.json").read_text())
    assert list(summary["seconds"]) == ["storm+", "adagrad-norm"]
    assert summary["seconds"]["storm+"] == 1234.5
    # The versions are those of the runs.
    assert summary["versions"]["numpy"] == f"0.0, {np.__version__}"
    # What the folder holds is drawn, also what this command did not ask for.
    again = command("--quick", "--method", "adagrad-norm")
    assert "to run: nothing" in again.output
    assert "| STORM+ |" in again.output


def test_a_result_is_read_back_bit_by_bit(tmp_path):
    one = dataclasses.replace(made_up("sgd"), tuning={"lr": [0.1, 0.3]})
    one.mean[0, 0, 0] = np.inf  # divergence is a result too
    save(one, TINY, tmp_path)
    found = load(tmp_path, TINY)["sgd"]
    np.testing.assert_array_equal(found.mean, one.mean)
    np.testing.assert_array_equal(found.square, one.square)
    assert (found.seconds, found.tuning, found.versions) == (1234.5, one.tuning, one.versions)


def test_another_plan_is_not_mixed_in(command, tmp_path):
    other = dataclasses.replace(TINY, steps=500, seeds=(0, 5))
    save(made_up("sgd", other), other, tmp_path)
    before = part(tmp_path, "sgd").read_bytes()
    refused(
        command("--quick"), "another plan", "in steps (500, not 400), seeds.", "another --output"
    )
    assert part(tmp_path, "sgd").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["methods"]
    # Nor are two plans that lie in one folder drawn together.
    save(made_up("storm+"), TINY, tmp_path)
    refused(command("--redraw"), "sgd.json is of another plan")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "cut short or damaged (not JSON"),
        (lambda text: "", "cut short or damaged (not JSON"),
        (lambda text: "[]", "not written by `stormplus rates`"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has format version 2"),
        (lambda text: text.replace('"seconds"', '"minutes"'), "damaged (no 'seconds')"),
        (lambda text: text.replace('"method": "sgd"', '"method": "storm"'), "results of storm)"),
        (lambda text: text.replace('"seeds": [0, 1]', '"seeds": [0, 1, 2]'), "shape"),
        (lambda text: text.replace('"dim"', '"dims"'), "unexpected keyword argument 'dims'"),
    ],
    ids=["cut", "empty", "other", "version", "key", "renamed", "shape", "plan"],
)
def test_a_file_that_cannot_be_used_is_named(command, tmp_path, damage, told):
    save(made_up("sgd"), TINY, tmp_path)
    file = part(tmp_path, "sgd")
    text = file.read_text()
    file.write_text(damage(text))
    assert file.read_text() != text
    refused(command("--quick"), str(file), told)
    refused(command("--redraw"), str(file), told)


def test_bytes_that_are_no_text_are_named_too(command, tmp_path):
    write_whole(part(tmp_path, "sgd"), b"\xff\x00")
    refused(command("--quick"), "cut short or damaged (not JSON")


def test_redraw_of_nothing(command, tmp_path):
    refused(command("--redraw"), f"no results in {tmp_path}", "leave out --redraw")
    missing = tmp_path / "missing"
    done = CliRunner().invoke(main, ["rates", "--redraw", "--output", str(missing)])
    refused(done, f"no results in {missing}")
    assert not missing.exists()


def test_redraw_from_the_raw_rows_alone(command, tmp_path):
    save(made_up("storm+"), TINY, tmp_path)
    assert command("--redraw").exit_code == 0
    names = ("rates.json", "rates_summary.json", "rates.md", "rates.png")
    drawn = [(tmp_path / name).read_bytes() for name in names]
    part(tmp_path, "storm+").unlink()
    assert command("--redraw").exit_code == 0
    assert [(tmp_path / name).read_bytes() for name in names] == drawn
    (tmp_path / "rates.json").write_text("[]")
    refused(command("--redraw"), "do not fit each other")
    (tmp_path / "rates.json").write_text("[")
    refused(command("--redraw"), "rates.json is cut short or damaged")


def test_a_disk_that_refuses_is_a_message(command, tmp_path):
    save(made_up("sgd"), TINY, tmp_path)
    (tmp_path / "rates.md").mkdir()
    refused(command("--redraw"), "rates.md")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    file = tmp_path / "some.json"
    write_whole(file, b"old")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_method_that_fails_is_named(capfd):
    with pytest.raises(MethodFailed, match=r"nothing ended without a result \(exit code 1\)"):
        run_all(TINY, ["nothing"], 1, lambda _: None)
    assert "Traceback" in capfd.readouterr().err  # of the process itself: what went wrong


def test_help_teaches():
    text = " ".join(CliRunner().invoke(main, ["rates", "--help"]).output.split())
    assert "[default: out/rates]" in text
    assert "Interrupt at will" in text
    assert all(option.help for option in rates.params)


# A method that ends at once beside one that tunes for hours. SIGINT as in a terminal: what a
# script starts in the background ignores it.
STOPPABLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from stormplus.theory.rates import Plan
from stormplus.theory.rates.command import rates
plan = Plan(**eval(sys.argv[2]))
Plan.quick = lambda: plan
chosen = ["--method", "storm", "--method", "adagrad-norm"]
rates(["--quick", "--jobs", "2", *chosen, "--output", sys.argv[1]])
"""


def wait_until(true, child, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(process):
    """A zombie has ended too: an orphan stays one until the system gets round to it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def blocks_ctrl_c(process):
    """Told by Linux; a traceback of the worker, which is what matters, is a race."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return True
    mask = next(line for line in status.read_text().splitlines() if line.startswith("SigBlk:"))
    return int(mask.split()[1], 16) >> (signal.SIGINT - 1) & 1


@pytest.mark.parametrize(
    "sign",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
    ids=["ctrl-c", "term", "kill"],
)
def test_an_interruption_ends_the_workers_and_keeps_what_is_done(tmp_path, monkeypatch, sign):
    settings = repr(dataclasses.asdict(TUNES_FOR_HOURS))
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPABLE, str(tmp_path), settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(part(tmp_path, "adagrad-norm").exists, child)
        family = psutil.Process(child.pid)
        wait_until(lambda: len(family.children(recursive=True)) == 2, child)
        below = family.children(recursive=True)  # multiprocessing's own helper, and STORM
        if sign == signal.SIGINT:
            # A terminal sends it to the workers too, which must leave it to us.
            (storm,) = (one for one in below if "--multiprocessing-fork" in one.cmdline())
            assert blocks_ctrl_c(storm)
            os.killpg(child.pid, sign)
        else:
            child.send_signal(sign)
        output, errors = child.communicate(timeout=60)
        assert all(ended(process) for process in below)  # nothing is left running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert "Traceback" not in errors
    if sign != signal.SIGKILL:
        assert child.returncode == 130
        assert f"what is done is in {tmp_path / 'methods'}: the same command goes on" in output
    # What is done is used; what is not is missing, and no half file is left.
    assert [path.name for path in (tmp_path / "methods").iterdir()] == ["adagrad-norm.json"]
    before = stamp("adagrad-norm", tmp_path)
    monkeypatch.setattr(Plan, "quick", lambda: TUNES_FOR_HOURS)
    given = ["--quick", "--method", "adagrad-norm", "--output", str(tmp_path)]
    again = CliRunner().invoke(rates, given, catch_exceptions=False)
    assert again.exit_code == 0
    assert "to run: nothing" in again.output
    assert stamp("adagrad-norm", tmp_path) == before


def test_the_documented_summary_is_of_today_s_plan_and_shape(command, tmp_path, request):
    file = request.config.rootpath / "docs/results/rates_summary.json"
    documented = json.loads(file.read_text())
    assert documented["plan"] == json.loads(json.dumps(dataclasses.asdict(Plan())))
    for name in METHODS:
        save(made_up(name), TINY, tmp_path)
    assert command("--redraw").exit_code == 0
    fresh = json.loads((tmp_path / "rates_summary.json").read_text())
    assert fresh.keys() == documented.keys()
    assert list(fresh["slopes"]) == list(documented["slopes"])
    assert read(tmp_path)[1] == TINY
