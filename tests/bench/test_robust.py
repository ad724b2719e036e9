"""`stormplus robust`: the cases match their names, and the verdicts follow from the rows."""

import json
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from stormplus_bench import rows
from stormplus_bench.commands import robust as command
from stormplus_bench.train import robust
from stormplus_bench.train.training import Training


def call(*arguments):
    return CliRunner().invoke(command.robust, [str(a) for a in arguments])


@pytest.fixture
def tiny(monkeypatch):
    """Two cases of a few steps."""
    monkeypatch.setitem(robust.CASES, "tiny, digits", partial(robust.on_digits, steps=30))
    walk = partial(robust.walk, 20, robust.noise, 1.0)
    monkeypatch.setitem(robust.CASES, "tiny, walk", walk)


@pytest.mark.usefixtures("tiny")
def test_one_line_per_case_and_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    done = call("--output", tmp_path, "--only", "tiny")
    assert done.exit_code == 0, done.output
    assert "2 of 2 cases passed" in done.output
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    assert [(row["method"], row["lr"]) for row in found] == 2 * [("Untuned", 1.0), ("Adam", 1e-3)]
    monkeypatch.setattr(command, "run", None)
    assert call("--output", tmp_path, "--only", "tiny").output == done.output


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("end", "passed"), [(0.9, True), (1.09, True), (1.2, False), (2.4, False), (None, False)]
)
def test_a_large_lag_or_an_end_at_chance_fails(tmp_path, end, passed):
    """From 2.3 Adam reaches 1: a tenth of its decrease is 0.13."""
    journal, case = tmp_path / "rows.jsonl", robust.case("tiny, digits")
    for method, last in (("Untuned", end), ("Adam", 1.0)):
        row = command.run(case, method)
        row["curve"]["train_loss"] = [2.3, last]
        rows.append(journal, row)
    line, found = command.judge(case, journal)
    assert found == passed
    assert end is None or f"| {(end - 1) / 1.3:+.2f} |" in line


@pytest.mark.usefixtures("tiny")
def test_a_walk_that_goes_too_far_fails(tmp_path):
    case = replace(robust.case("tiny, walk"), chance=1e-3)
    assert not command.judge(case, tmp_path / "rows.jsonl")[1]


def test_names():
    assert call("--only", "nonsense").exit_code == 2
    listed = call("--list", "--only", "3,000 steps").output
    assert listed == " steps  case\n 3,000  markov, 500 tokens, relu, 3,000 steps\n"


@pytest.mark.parametrize("name", [name for name in robust.CASES if "2000" not in name])
def test_every_case_starts_near_chance_and_has_a_gradient(name):
    case = robust.case(name)
    run = Training(case, command.METHODS["Adam"][1], 0)
    start = run.record()["train_loss"]
    if case.walk:
        assert start == 0
    else:  # the N(0, 1) embeddings of the factorisation start far above
        assert 0.9 * case.chance < start < 20 * case.chance
    run.advance(1)
    assert run.status == "done"
    waits = "zero for 500" in name
    assert any(float(p.grad.abs().max()) > 0 for p in run.parameters) == (not waits)
