"""The GitHub workflows are valid, and run the environments of `make test-versions`."""

import re
import runpy
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_files_are_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_matrix_of_versions_is_that_of_the_tool():
    tool = runpy.run_path(str(ROOT / "tools" / "environments.py"))["ENVIRONMENTS"]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text())["jobs"]
    (job,) = jobs.values()
    matrix = {row["environment"]: row["python"] for row in job["strategy"]["matrix"]["include"]}
    assert matrix == {name: environment.python for name, environment in tool.items()}
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^VERSIONS \?= (.+)", makefile, re.MULTILINE)[1].split() == list(tool)
