"""A user's optimizer and model: from Python, from files, and on workers."""

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stormplus import StormPlus, Untuned
from stormplus_bench import compare, own, rows
from stormplus_bench.commands.compare import compare as command
from stormplus_bench.engine import execute
from stormplus_bench.plan import make_plan, with_own
from stormplus_bench.train.catalogue import EVERY

# The templates, with a module of the user's beside them.
SOLVER, WORKLOAD = (
    "import beside\n" + (own.TEMPLATES / f"{name}.py").read_text().replace("200", "20")
    for name in ("solver", "workload")
)
SUITE = {
    "objective": [{"Training loss": {"seed": [0]}}],
    "dataset": [{"smooth": {"problem": ["nmf"]}}],
    "solver": [{"sgd": {"lr": [0.1]}}],
}


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "my files, [new]"
    folder.mkdir()
    for name, text in (("mine", SOLVER), ("lines", WORKLOAD), ("beside", "")):
        (folder / f"{name}.py").write_text(text)
    return folder


def line(**changes):
    """A linear regression as a dict."""
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    parts = {"model": lambda: nn.Linear(3, 1), "data": (inputs, inputs.sum(1, keepdim=True))}
    parts["loss"] = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    return parts | {"budget": 30, "batch_size": 10} | changes


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr)


def end_of(workload, make=sgd):
    return compare({"a": make}, workload, progress=False).table["training loss"].item()


def test_a_dict_of_optimizers_gives_a_table_a_figure_and_rows(tmp_path):
    methods = {"mine": sgd, "<b>": (sgd, np.array([0.01, 0.2])), "STORM+": StormPlus}
    two = np.int64(2)
    found = compare(methods, workload=line(valid=line()["data"]), seeds=two, progress=False)
    assert found.table.loc["<b>", "lr"] == 0.2
    assert found.table["seeds"].to_list() == [2, 2, 2]
    assert found.table["training loss"].is_monotonic_increasing
    assert "validation accuracy" not in found.table
    starts = found.frame[found.frame["evaluations"] == 0]
    assert starts.groupby("seed")["train_loss"].nunique().to_list() == [1, 1]
    spent = found.frame.groupby("method")["evaluations"].max()
    assert (spent["mine"], spent["STORM+"]) == (30, 29)  # two gradients per step
    (axis,) = found.plot().axes
    ends = [drawn.get_ydata()[-1] for drawn in axis.get_lines() if len(drawn.get_ydata()) > 2]
    for loss in found.table["training loss"]:
        assert min(abs(end - loss) for end in ends) < 1e-12
    page = found._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "mine" in repr(found)
    journal = found.save(tmp_path / "new" / "rows.jsonl")
    assert len(rows.keys(journal)) == 2 * 4


def test_a_list_of_classes_is_named_by_them(monkeypatch):
    monkeypatch.setitem(EVERY, "mlp-digits", lambda: own.workload_of(line()))
    found = compare([Untuned, torch.optim.Adam], progress=False)
    assert set(found.table.index) == {"Untuned", "Adam"}
    assert "Untuned" in repr(found)


def test_a_seed_determines_dropout():
    def model():
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    torch.manual_seed(0)
    first = end_of(line(model=model))
    torch.manual_seed(1)
    assert end_of(line(model=model)) == first


def test_a_workload_of_the_benchmark_by_its_name():
    found = compare({"[/a]": sgd}, workload="logistic-breast-cancer")
    assert found.table.loc["[/a]", "validation accuracy"] > 0.8


def test_kinds_of_data_and_of_models_give_the_same_runs():
    inputs, targets = line()["data"]
    net = nn.Linear(3, 1)
    start = net.weight.clone()
    kinds = [
        (inputs, targets),
        [inputs.numpy(), targets.numpy()],
        TensorDataset(inputs, targets),
        lambda: (inputs, targets),
    ]
    assert len({end_of(line(model=net, data=data)) for data in kinds}) == 1
    assert torch.equal(net.weight, start)
    dicts = [{"x": x, "y": y} for x, y in zip(inputs, targets)]
    loss = lambda model, b: nn.functional.mse_loss(model(b["x"]), b["y"])  # noqa: E731
    assert end_of(line(model=net, data=dicts, loss=loss)) == end_of(line(model=net))


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (line(budget=0), "yours: budget should be a positive int, got 0"),
        (line(data=(torch.ones(3), torch.ones(2))), r"data: lengths differ, \[3, 2\]"),
        (line(data=()), "data is empty"),
        (line(data={"x": 3}), r"data should be \(inputs, targets\)"),
        (line(data=DataLoader(TensorDataset(torch.ones(3)))), "not its DataLoader"),
        (line(batchsize=3), "a workload has no batchsize; it has name, model, loss"),
        ({}, "a workload needs model, loss, data, budget"),
        ("nfm", r"no workload 'nfm', did you mean 'nmf'\? Choose from .*digits"),
    ],
)
def test_a_wrong_workload_is_explained(workload, message):
    with pytest.raises((TypeError, ValueError), match=message):
        end_of(workload)


@pytest.mark.parametrize(
    ("methods", "seeds", "message"),
    [
        ({"a": lambda p: 3}, 1, "a: make should return a torch.optim.Optimizer, got 3"),
        ({"a": torch.optim.LBFGS}, 1, "a: LBFGS.step needs a closure"),
        ({"a": "Adam"}, 1, "a: make should be a function, got 'Adam'"),
        ({}, 1, "nothing to compare"),
        ({"a": (sgd, "x")}, 1, "a: rates should be a list of numbers, got 'x'"),
        ({"a": sgd}, 1.5, "'float' object cannot be interpreted as an integer"),
        ({3: sgd}, 1, "name should be a text of one line, got 3"),
        (Untuned, 1, "object is not iterable"),
    ],
)
def test_a_wrong_method_is_explained(methods, seeds, message):
    with pytest.raises((TypeError, ValueError), match=message):
        compare(methods, workload=line(), seeds=seeds, progress=False)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_method_that_raises_keeps_the_other_runs(error):
    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            raise error("a broken disk")

    with pytest.raises(error, match="a broken disk") as caught:
        compare({"good": sgd, "bad": Breaks}, workload=line(), progress=False)
    assert list(caught.value.result.table.index) == ["good"]
    assert caught.value.__notes__ == ["in a run of bad, seed 0; .result has the others"]


def test_the_template_with_two_gradients_counts_them():
    method = own.read_method(str(own.TEMPLATES / "two_gradients.py"))
    found = compare({"mine": (method.make, [0.1])}, line(), progress=False).frame
    assert found["evaluations"].max() == 2 * found["samples"].max() == 30
    assert found["train_loss"].iloc[-1] < found["train_loss"].iloc[0]


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def test_files_join_a_suite(files):
    def keys(*arguments, **options):
        runs = make_plan(with_own(SUITE, *arguments, **options)).runs
        return {(run.workload, run.method, run.lr, run.seed) for run in runs}

    solvers, workloads = [files / "mine.py"], [files / "lines.py"]
    rates = (("SGD", 0.1), ("Mine", 2e-3), ("Mine", 1e-2))
    assert keys(solvers, workloads, seeds=2) == {
        ("lines", m, lr, seed) for m, lr in rates for seed in (0, 1)
    }
    assert {key[0] for key in keys(solvers)} == {"nmf"}
    assert {key[1] for key in keys(solvers, alone=True)} == {"Mine"}
    chosen = make_plan(with_own(SUITE, solvers), methods=["SGD"]).runs  # of the suite's methods
    assert {run.method for run in chosen} == {"SGD", "Mine"}
    (files / "copy.py").write_text(SOLVER)
    with pytest.raises(ValueError, match="two files have the name Mine"):
        keys([*solvers, files / "copy.py"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine", "rates = [1]", "name should be a text of one line, got None"),
        ("mine", "name = 'Adam'", "Adam is a method of the benchmark"),
        ("mine", "name, make = 'a', print", "rates should be a list of numbers, got None"),
        ("mine", "x = 1\n1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("mine", "import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
        ("mine", "x = (", "line 1: SyntaxError"),
        ("lines", "budget = 3", "a workload needs model, loss, data"),
        ("lines", WORKLOAD.replace("(32, 2)", "(5, 2)"), "lines.py, line 17: RuntimeError"),
        ("lines", WORKLOAD + "name = 'nmf'", "nmf is a workload of the benchmark"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(files, tmp_path, name, text, message):
    (files / f"{name}.py").write_text(textwrap.dedent(text))
    given = ["--solver", files / "mine.py", "--workload", files / "lines.py"]
    done = call("quick", *given, "--output", tmp_path / "out", "--dry-run")
    assert done.exit_code == 1, done.output
    assert f"{name}.py" in done.output
    assert message in done.output


@pytest.mark.long
@pytest.mark.parametrize("config", [None, "dask.yml"], ids=["alone", "dask"])
def test_workers_read_the_files(files, tmp_path, config):
    journal = tmp_path / "rows.jsonl"
    plan = make_plan(with_own(SUITE, [files / "mine.py"], [files / "lines.py"]))
    folder = Path(__file__).parents[2] / "benchmark" / "parallel"
    execute(plan, journal, parallel_config=folder / config if config else None)
    log = journal.with_suffix(".log").read_text()
    assert ("Distributed run with backend: dask" in log) == (config is not None)
    found = [json.loads(text) for text in journal.read_text().splitlines()[1:]]
    assert sorted((row["method"], row["lr"], row["default"]) for row in found) == [
        ("Mine", 0.002, True),
        ("Mine", 0.01, False),
        ("SGD", 0.1, False),
    ]
    task = own.read_workload(str(files / "lines.py"))
    method = own.read_method(str(files / "mine.py"))
    same = compare({"Mine": (method.make, method.rates)}, workload=task, progress=False)
    curves = [
        {row["lr"]: row["curve"]["train_loss"] for row in part if row["method"] == "Mine"}
        for part in (found, same.rows)
    ]
    assert curves[0] == curves[1]
    assert str(files) not in str(found)  # rows contain no path of the user's
