"""`stormplus robust`: the cases are what their names say, and the verdicts follow from the rows."""

import json
import math
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from stormplus_bench import rows
from stormplus_bench.commands import robust as command
from stormplus_bench.train import robust
from stormplus_bench.train.training import Training

pytestmark = pytest.mark.usefixtures("one_thread")


def call(*arguments):
    return CliRunner().invoke(command.robust, [str(a) for a in arguments])


@pytest.fixture
def tiny(monkeypatch):
    """Two cases of a few steps."""
    monkeypatch.setitem(robust.CASES, "tiny, digits", partial(robust.on_digits, steps=30))

    def walk():
        case = robust.constant_gradient()
        case.budget = 20
        return case

    monkeypatch.setitem(robust.CASES, "tiny, walk", walk)


@pytest.mark.usefixtures("tiny")
def test_a_line_a_case_and_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    done = call("--output", tmp_path, "--only", "tiny")
    assert done.exit_code == 0, done.output
    _, _, digits, walk, _, last = done.output.splitlines()
    assert digits.startswith("| tiny, digits | 30 | 2.3 | 2.3 |")
    assert walk.endswith("|  | ok |")
    assert last.startswith("2 of 2 cases passed")
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    keys = [(row["workload"], row["method"], row["lr"], row["budget"]) for row in found]
    assert keys == [
        (name, method, lr, steps)
        for name, steps in (("tiny, digits", 30), ("tiny, walk", 20))
        for method, lr in (("Untuned", 1.0), ("Adam", 1e-3))
    ]
    monkeypatch.setattr(command, "run", None)
    assert call("--output", tmp_path, "--only", "tiny").output == done.output


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("end", "good"), [(0.9, True), (1.09, True), (1.2, False), (2.4, False), (None, False)]
)
def test_who_is_far_behind_or_no_better_than_chance_fails(tmp_path, end, good):
    """From 2.3 Adam comes to 1: a tenth of its decrease is 0.13."""
    journal, case = tmp_path / "rows.jsonl", robust.case("tiny, digits")
    for method, last in (("Untuned", end), ("Adam", 1.0)):
        row = command.run(case, method)
        row["curve"]["train_loss"] = [2.3, last]
        rows.append(journal, row)
    line, passed = command.judged(case, journal)
    assert passed == good
    assert line.endswith("| ok |" if good else "| **FAIL** |")
    if end is not None:
        assert f"| {(end - 1) / 1.3:+.2f} |" in line


@pytest.mark.usefixtures("tiny")
def test_a_walk_that_goes_too_far_fails(tmp_path):
    journal, case = tmp_path / "rows.jsonl", robust.case("tiny, walk")
    case.chance = 1e-3
    assert not command.judged(case, journal)[1]


def test_an_unknown_name_says_where_the_names_are():
    done = call("--only", "nonsense")
    assert done.exit_code == 2
    assert "--list" in done.output
    listed = call("--list", "--only", "3,000 steps").output
    assert listed == " 3,000  markov, 500 tokens, relu, 3,000 steps\n"


@pytest.mark.parametrize("name", [name for name in robust.CASES if "2000" not in name])
def test_every_case_has_a_start_near_chance_and_a_gradient(name):
    case = robust.case(name)
    run = Training(case, command.METHODS["Adam"][1], 0)
    start = run.record()["train_loss"]
    if case.walk:
        assert start == 0
    else:  # N(0, 1) embeddings of a factorisation start far above
        assert 0.9 * case.chance < start < 20 * case.chance
    run.advance(1)
    assert run.status == "done"
    waits = "zero for 500" in name
    assert any(float(p.grad.abs().max()) > 0 for p in run.parameters) == (not waits)


def test_other_weights_of_the_same_function_are_that():
    x = torch.randn(5, 64)
    for make in (robust.unbalanced, robust.low_rank):
        models = []
        for build in (robust.plain, make):
            torch.manual_seed(0)
            models.append(build())
        torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-4, atol=1e-5)
    trained = {n.split(".")[-1] for n, p in models[1].named_parameters() if p.requires_grad}
    assert trained == {"A", "B"}


def test_a_walk_is_measured_in_sizes_of_its_start():
    model = robust.Walker()
    with torch.no_grad():
        model.weight.mul_(4)
    assert robust.constant_gradient().measure(model)["train_loss"] == pytest.approx(3)
    assert robust.pure_noise().chance == pytest.approx(math.sqrt(1 + math.log(30_000)))
