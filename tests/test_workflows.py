"""The files under .github: what runs there is what runs here, on the versions that are claimed."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def checks():
    return yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]["checks"]


def test_runs_exactly_the_three_commands():
    commands = [step["run"] for step in checks()["steps"] if "run" in step]
    assert commands == ["make lint", "make test", "make docs"]


def test_matrix_has_the_oldest_and_the_newest_python():
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    claimed.sort(key=lambda version: int(version.split(".")[1]))
    tested = [row["python"] for row in checks()["strategy"]["matrix"]["include"]]
    assert {claimed[0], claimed[-1]} <= set(tested)
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_matrix_has_the_oldest_torch():
    (need,) = PROJECT["optional-dependencies"]["torch"]
    oldest = need.removeprefix("torch>=")
    tested = [row["torch"] for row in checks()["strategy"]["matrix"]["include"]]
    assert any(version.startswith(oldest) for version in tested)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_files_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("name", ["bug", "results"])
def test_issue_forms_have_what_github_asks_for(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    for field in form["body"]:
        assert field["attributes"]["label"]
