"""The files under .github: what runs there is what runs here, on the versions that are claimed."""

import re
import runpy
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]


def job(name):
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"][name]


def matrix(name):
    return job(name)["strategy"]["matrix"]["include"]


def test_runs_exactly_the_three_commands():
    commands = [step["run"] for step in job("checks")["steps"] if "run" in step]
    assert commands == ["make lint", "make test", "make docs"]


def test_the_checks_run_on_the_pinned_versions():
    makefile = (ROOT / "Makefile").read_text()
    torch = re.search(r"^TORCH \?= (\S+)", makefile, re.MULTILINE)[1]
    assert matrix("checks") == [{"python": "3.11", "torch": torch}]


def test_the_matrix_of_versions_is_that_of_the_tool():
    tool = runpy.run_path(str(ROOT / "tools" / "environments.py"))
    assert {row["environment"]: row["python"] for row in matrix("versions")} == {
        name: environment.python for name, environment in tool["ENVIRONMENTS"].items()
    }
    default = re.search(r"^VERSIONS \?= (.+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert default.split() == list(tool["ENVIRONMENTS"])
    (command,) = [step["run"] for step in job("versions")["steps"] if "run" in step]
    assert command.startswith("make test-versions ")


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_files_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("name", ["bug", "results"])
def test_issue_forms_have_what_github_asks_for(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    for field in form["body"]:
        assert field["attributes"]["label"]
