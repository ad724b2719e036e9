"""What commands that run a plan print, and how they end."""

from io import StringIO

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("benchopt")

from bench_rows import frame_of, hand_made, make_run

from stormplus.bench.compare_command import compare, show
from stormplus.bench.paper_command import paper
from stormplus.bench.plan import Plan, Run
from stormplus.bench.running import announce
from stormplus.bench.summary import table_of


def printed(*things, width=100):
    output = StringIO()
    Console(file=output, width=width).print(*things)
    return output.getvalue()


def plan_of(frame):
    runs = [Run(w, "SGD", 0.1, 0, 100) for w in sorted(set(frame["workload"]))]
    return Plan({}, runs, {}, dict.fromkeys([run.workload for run in runs], 1.2))


def test_a_few_workloads_are_shown_by_their_losses(tmp_path):
    text = printed(table_of(frame_of(tmp_path, hand_made())))
    assert "final training loss" in text
    # SGD on a, at its default and at its best; Adam diverges there.
    cells = [line.strip("│ ").split() for line in text.replace("│", " ").splitlines()]
    assert ["SGD", "4", "0.5", "1"] in cells
    assert ["Adam", "diverged", "diverged"] in cells
    assert "…" not in printed(table_of(frame_of(tmp_path, hand_made())), width=60)


def test_many_workloads_fit_a_terminal(tmp_path):
    runs = [
        make_run([2, 1, 0.9], workload=f"workload-{k}", method=method)
        for k in range(12)
        for method in ("STORM+ mean", "simplified STORM+", "SGD momentum")
    ]
    text = printed(table_of(frame_of(tmp_path, runs)))
    assert "12 workloads" in text
    assert "simplified STORM+" in text
    assert "1.00" in text
    assert "…" not in text


def test_with_other_workers_the_number_at_a_time_is_not_made_up(tmp_path):
    plan = plan_of(frame_of(tmp_path, hand_made()))
    output = StringIO()
    announce(plan, tmp_path / "none.jsonl", 2, Console(file=output, width=200))
    announce(plan, tmp_path / "none.jsonl", None, Console(file=output, width=200))
    first, second = output.getvalue().splitlines()
    assert "projected: 2.0 minutes for the other 2, 2 at a time" in first
    assert "projected: 4.0 minutes for the other 2, divided by the number of workers" in second


def test_a_line_that_another_suite_left_halfway_is_not_in_the_way(tmp_path):
    frame = frame_of(tmp_path, hand_made())
    with (tmp_path / "rows.jsonl").open("a") as journal:
        journal.write('{"workload": "other", "met')
    output = StringIO()
    show(tmp_path / "rows.jsonl", plan_of(frame), tmp_path, Console(file=output, width=120))
    assert "curves.png" in output.getvalue()


@pytest.mark.parametrize("command", [compare, paper])
def test_the_help_tells_options_defaults_and_exit_codes(command):
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "130 interrupted" in text
    assert "Runs side by side. [default: 1; x>=1]" in text
    assert "[out/SUITE]" in text or "[default: out/paper]" in text
