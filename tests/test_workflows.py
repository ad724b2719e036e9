"""The GitHub workflows run what runs here, on the versions that are claimed."""

import re
import runpy
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def jobs(name):
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_checks_run_what_ci_runs():
    ran = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    assert set(ran) <= set(commands(jobs("checks")["linux"]))


def test_the_matrix_of_versions_is_that_of_the_tool():
    tool = runpy.run_path(str(ROOT / "tools" / "environments.py"))
    (job,) = jobs("versions").values()
    assert {row["environment"]: row["python"] for row in job["strategy"]["matrix"]["include"]} == {
        name: environment.python for name, environment in tool["ENVIRONMENTS"].items()
    }
    default = re.search(r"^VERSIONS \?= (.+)", MAKEFILE, re.MULTILINE)[1]
    assert default.split() == list(tool["ENVIRONMENTS"])


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_files_are_yaml(path):
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    for field in found.get("body", []):  # of an issue form
        assert field["attributes"]
