"""An optimizer and a model of one's own: from Python, from files, and on workers."""

import html
import json
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from stormplus import StormPlus, Untuned
from stormplus_bench import Comparison, compare, own, rows
from stormplus_bench.commands.compare import compare as command
from stormplus_bench.commands.report import read
from stormplus_bench.engine import execute
from stormplus_bench.plan import BadSuite, check_unchanged, make_plan, read_suite, with_own
from stormplus_bench.train.steppers import AtAverage, OneGradient, TwoGradients
from stormplus_bench.train.training import Training

pytestmark = pytest.mark.usefixtures("one_thread")

SOLVER = """
import torch

name, rates = "Mine", [2e-3, 1e-2]

def make(parameters, lr):
    return torch.optim.NAdam(parameters, lr)
"""
WORKLOAD = """
from torch import nn

from beside import inputs, targets

name, budget, batch_size = "lines", 20, 8
data, valid = (inputs[:48], targets[:48]), (inputs[48:], targets[48:])

def model():
    return nn.Linear(4, 1)

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
BESIDE = """
import torch

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)
"""
SUITE = {
    "objective": [{"Training loss": {"seed": [0]}}],
    "dataset": [{"smooth": {"problem": ["nmf"]}}],
    "solver": [{"sgd": {"lr": [0.1]}}],
}


@pytest.fixture
def files(tmp_path):
    """A folder as people name them."""
    folder = tmp_path / "my files, [new]"
    folder.mkdir()
    for name, text in (("mine", SOLVER), ("lines", WORKLOAD), ("beside", BESIDE)):
        (folder / f"{name}.py").write_text(text)
    return folder


def line(**changes):
    """A dict of the same words: a linear regression."""
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    parts = {"model": lambda: nn.Linear(3, 1), "data": (inputs, inputs.sum(1, keepdim=True))}
    parts["loss"] = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
    return parts | {"budget": 30, "batch_size": 10} | changes


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr)


def test_a_dict_of_optimizers_gives_a_table_a_picture_and_rows(tmp_path):
    methods = {"mine": sgd, "<b>": (sgd, [0.01, 0.2]), "STORM+": StormPlus}
    found = compare(methods, workload=line(valid=line()["data"]), seeds=2, progress=False)
    assert isinstance(found, Comparison)
    assert found.table.index[0] in ("mine", "<b>")
    assert found.table.loc["<b>", "lr"] == 0.2
    assert found.table["seeds"].to_list() == [2, 2, 2]
    assert (found.table["lowest"] <= found.table["training loss"]).all()
    assert "validation accuracy" not in found.table  # nobody said what that is
    # Everybody starts at the same point; two gradients a step leave one evaluation unused.
    starts = found.frame[found.frame["evaluations"] == 0]
    assert starts.groupby("seed")["train_loss"].nunique().to_list() == [1, 1]
    spent = found.frame.groupby("method")["evaluations"].max()
    assert (spent["mine"], spent["STORM+"]) == (30, 29)
    # The picture has the runs of the table.
    (axis,) = found.plot().axes
    ends = [line.get_ydata()[-1] for line in axis.get_lines() if len(line.get_ydata()) > 2]
    for loss in found.table["training loss"]:
        assert min(abs(end - loss) for end in ends) < 1e-12
    page = found._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "</svg>" in page
    assert "mine" in str(found)
    # The rows join others in a report.
    journal = found.save(tmp_path / "new" / "rows.jsonl")
    assert len(rows.keys(journal)) == 2 * 4
    assert set(read((journal,))["method"]) == set(methods)


def test_a_seed_decides_what_a_model_draws_too():
    def model():
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def end(seed):
        torch.manual_seed(seed)  # of the process: it must not matter
        found = compare({"mine": sgd}, workload=line(model=model), progress=False)
        return found.table["training loss"].to_list()

    assert end(0) == end(1)


def test_a_workload_of_the_benchmark_by_its_name():
    found = compare({"[/a]": sgd}, workload="logistic-breast-cancer")
    assert found.table.loc["[/a]", "validation accuracy"] > 0.8
    with pytest.raises(ValueError, match=r"no workload 'nothing': there are .*mlp-digits"):
        compare({"a": sgd}, workload="nothing")


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"x": torch.tensor([float(i)]), "y": i**2}


def test_data_may_be_a_data_set_of_dicts_and_the_model_may_normalise_batches():
    def loss(model, batch):
        return (model(batch["x"])[:, 0] - batch["y"]).square().mean()

    made = own.workload_of(
        line(
            data=Squares,
            loss=loss,
            model=lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)),
            accuracy=lambda model, batch: len(batch["y"]) / 20,
        )
    )
    model = made.model(0)
    assert made.batch_norm
    assert made.measure(model)["train_accuracy"] == 1
    batch = next(made.samples(0))
    assert batch["x"].shape == (10, 1)
    assert torch.equal(batch["x"][:, 0].long() ** 2, batch["y"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": (torch.zeros(3, 1), torch.zeros(4, 1))}, r"data: lengths differ, \[3, 4\]"),
        ({"data": (torch.zeros(0, 1),)}, "data is empty"),
        ({"data": 3}, r"data should be \(inputs, targets\), or a torch Dataset"),
        ({"data": torch.utils.data.DataLoader(Squares())}, "not its DataLoader"),
        ({"budget": 0}, "budget should be a positive int, got 0"),
        ({"loss": None}, "loss should be a function, got None"),
        ({"lr": 1}, "a workload has no lr; it has name, model, loss"),
    ],
)
def test_a_wrong_workload_is_explained(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        compare({"a": sgd}, workload=line(**changes))


def test_a_wrong_method_is_explained():
    for make, message in (
        (lambda parameters: 3, "mine: make should return a torch.optim.Optimizer, got 3"),
        (torch.optim.LBFGS, "mine: LBFGS.step needs a closure"),
        ("Adam", "mine: should be a function of the parameters, got 'Adam'"),
    ):
        with pytest.raises(TypeError, match=message):
            compare({"mine": make}, workload=line(), progress=False)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({}, workload=line())


@pytest.mark.parametrize("given", ["a model", "the same from a function"])
def test_every_method_starts_from_the_weights_that_are_given(given):
    net = nn.Linear(3, 1)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    made = line(model=net if given == "a model" else lambda: net)
    told = compare({"a": sgd, "b": sgd, "c": sgd}, workload=made, progress=False)
    assert told.table["training loss"].nunique() == 1
    assert all(torch.equal(value, start[name]) for name, value in net.state_dict().items())


def test_arrays_are_data_as_tensors_are():
    as_tensors = line()
    inputs, targets = as_tensors["data"]
    as_arrays = line(data=[inputs.numpy(), targets.numpy()])
    losses = [
        compare({"a": sgd}, workload=made, progress=False).table["training loss"].item()
        for made in (as_tensors, as_arrays)
    ]
    assert losses[0] == losses[1]
    with pytest.raises(TypeError, match=r"data should be \(inputs, targets\)"):
        compare({"a": sgd}, workload=line(data={"x": inputs}), progress=False)


def test_rates_and_seeds_of_numpy_can_be_saved(tmp_path):
    rates = np.logspace(-2, -1, 2)
    told = compare({"a": (sgd, rates)}, workload=line(), seeds=np.int64(2), progress=False)
    assert len(rows.load(told.save(tmp_path / "rows.jsonl"))["seed"].unique()) == 2


@pytest.mark.parametrize(
    ("methods", "seeds", "message"),
    [
        ({"a": (sgd, 0.1)}, 1, r"a: the rates should be a list of numbers, got 0\.1"),
        ({"a": sgd}, 1.5, r"seeds should be a number of them, or a list, got 1\.5"),
        ({"": sgd}, 1, "name of a method should be a text of one line, got ''"),
        ({3: sgd}, 1, "name of a method should be a text of one line, got 3"),
    ],
)
def test_what_could_not_be_saved_is_told_before_it_runs(methods, seeds, message):
    with pytest.raises((TypeError, ValueError), match=message):
        compare(methods, workload=line(), seeds=seeds, progress=False)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_method_that_raises_leaves_what_the_others_have_done(error):
    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            raise error("a broken disc")

    with pytest.raises(error, match="a broken disc") as told:
        compare({"good": sgd, "bad": Breaks}, workload=line(), progress=False)
    assert list(told.value.result.table.index) == ["good"]
    assert told.value.__notes__ == ["in a run of bad, seed 0; .result has the rest"]


def test_an_optimizer_without_a_rate():
    class NoRate(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, 0.1)
            self.defaults["lr"] = self.param_groups[0]["lr"] = None

        def step(self, closure=None):
            pass

    assert compare({"a": NoRate}, workload=line(), progress=False).frame["lr"].iloc[0] == 1.0


@pytest.mark.parametrize("solvers", ["", " 3", " []"])
def test_a_suite_that_is_no_list_is_explained(tmp_path, solvers):
    path = tmp_path / "suite.yml"
    path.write_text(f"dataset:\n- smooth\nsolver:{solvers}\n")
    with pytest.raises(BadSuite, match="solver should be a list with something in it"):
        read_suite(str(path))


def test_every_kind_of_optimizer_takes_its_own_step():
    schedulefree = pytest.importorskip("schedulefree")
    kinds = {sgd: OneGradient, StormPlus: TwoGradients, Untuned: AtAverage}
    kinds[lambda p: schedulefree.AdamWScheduleFree(p)] = AtAverage
    for make, kind in kinds.items():
        method = own.Method("mine", make)
        training = Training(own.workload_of(line()), lambda run: method.stepper(run, None), 0)
        assert type(training.stepper) is kind
        training.advance(4)
        assert training.record()["train_loss"] < 10


def test_the_page_shows_the_templates():
    page = (Path(__file__).parents[2] / "docs" / "compare-your-own.md").read_text()
    for name in ("solver", "workload"):
        text = (own.TEMPLATES / f"{name}.py").read_text().split('"""', 2)[2]
        blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert "".join(text.split()) in ["".join(block.split()) for block in blocks]
    assert own.read_method(str(own.TEMPLATES / "solver.py")).rates == (0.002, 0.01)


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def test_files_join_a_suite(files, tmp_path):
    config = with_own(SUITE, [files / "mine.py"], [files / "lines.py"], seeds=2)
    plan = make_plan(config)
    keys = {(run.workload, run.method, run.lr, run.seed) for run in plan.runs}
    rates = (("SGD", 0.1), ("Mine", 2e-3), ("Mine", 1e-2))
    assert keys == {("lines", m, lr, seed) for m, lr in rates for seed in (0, 1)}
    # Without a model of one's own the suite's are trained.
    assert {run.workload for run in make_plan(with_own(SUITE, [files / "mine.py"])).runs} == {"nmf"}
    # Alone, for rows that join the committed ones.
    mine = make_plan(with_own(SUITE, [files / "mine.py"], alone=True))
    assert {run.method for run in mine.runs} == {"Mine"}
    assert call("quick", "--alone").exit_code == 2
    text = call("--help").output
    for word in ("--solver", "--workload", "def make(parameters, lr):", "def loss(model, batch):"):
        assert word in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine", "rates = [1]", "name should be a text, got None"),
        ("mine", "name = 'Adam'", "Adam is a method of the benchmark"),
        ("mine", "name = 'a'", "make should be a function, got None"),
        ("mine", "name, make = 'a', print", "rates should be a list of numbers, got None"),
        ("mine", "x = 1\n1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("mine", "x = (", "line 1: SyntaxError"),
        ("lines", "budget = 3", "a workload needs model, loss, data"),
        ("lines", WORKLOAD + "budget = 'a'", "budget should be a positive int, got 'a'"),
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


def test_two_files_of_one_name_are_refused(files):
    (files / "copy.py").write_text(SOLVER)
    with pytest.raises(ValueError, match="two files have the name Mine"):
        with_own(SUITE, [files / "mine.py", files / "copy.py"])


def test_rows_of_an_older_version_of_a_file_do_not_pass_for_new_ones(files, tmp_path):
    journal = tmp_path / "rows.jsonl"
    given = [files / "mine.py"], [files / "lines.py"]
    check_unchanged(journal, *given)
    found = compare({"Mine": sgd}, workload=own.read_workload(str(files / "lines.py")))
    (row,) = found.rows
    assert list(row["files"]) == ["workload"]
    version = own.fingerprint(str(files / "mine.py"))
    rows.append(journal, row | {"files": row["files"] | {"method": version}})
    check_unchanged(journal, *given)
    (files / "lines.py").write_text(WORKLOAD + "# changed")
    with pytest.raises(ValueError, match=r"lines\.py has changed since runs of lines"):
        check_unchanged(journal, *given)
    (files / "mine.py").write_text(SOLVER + "# changed")
    with pytest.raises(ValueError, match=r"mine\.py has changed since runs of Mine"):
        check_unchanged(journal, *given)


@pytest.mark.long
@pytest.mark.parametrize("config", [None, "dask.yml"], ids=["alone", "dask"])
def test_runs_carry_the_files_to_their_workers(files, tmp_path, config):
    journal = tmp_path / "rows.jsonl"
    plan = make_plan(with_own(SUITE, [files / "mine.py"], [files / "lines.py"]))
    folder = Path(__file__).parents[2] / "benchmark" / "parallel"
    execute(plan, journal, parallel_config=folder / config if config else None)
    found = [json.loads(text) for text in journal.read_text().splitlines()[1:]]
    assert sorted((row["method"], row["lr"], row["default"]) for row in found) == [
        ("Mine", 0.002, True),
        ("Mine", 0.01, False),
        ("SGD", 0.1, False),
    ]
    files_of = {row["method"]: sorted(row["files"]) for row in found}
    assert files_of == {"Mine": ["method", "workload"], "SGD": ["workload"]}
    # The same numbers as from Python.
    task = own.read_workload(str(files / "lines.py"))
    method = own.read_method(str(files / "mine.py"))
    same = compare({"Mine": (method.make, method.rates)}, workload=task, progress=False)
    curves = [{row["lr"]: row["curve"]["train_loss"] for row in part if row["method"] == "Mine"}
              for part in (found, same.rows)]  # fmt: skip
    assert curves[0] == curves[1]
    assert html.escape(str(files)) not in str(found)  # no folder of the user's in the rows
