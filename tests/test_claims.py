"""What metadata, and the page of versions, claim is what `make test-versions` has run."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BENCH = tomllib.loads((ROOT / "benchmark" / "pyproject.toml").read_text())["project"]
TOOL = runpy.run_path(str(ROOT / "tools" / "environments.py"))
ROWS = json.loads((ROOT / "docs" / "results" / "versions.json").read_text())
PINNED = "3.11"  # what `make test` runs on
# The environment and the part of its row where each extra was run at its floors.
FLOORS = (
    dict.fromkeys(TOOL["LIBRARY"], ("oldest", "library"))
    | {
        extra: (name, "trainers")
        for name, environment in TOOL["ENVIRONMENTS"].items()
        for extra in environment.trainers + environment.alone
    }
    | {TOOL["BENCHMARK"]: ("benchmark", "benchmark")}
)


def padded(version):
    return [*map(int, version.split("+")[0].split(".")), 0, 0, 0][:3]


def minor(part):
    return ".".join(part["python"].split(".")[:2])


def test_nothing_that_was_run_failed():
    required = {name for name, made in TOOL["ENVIRONMENTS"].items() if not made.optional}
    assert required <= set(ROWS)
    parts = [part for row in ROWS.values() for part in row.values()]
    assert all(part["failed"] == 0 and part["passed"] > 50 for part in parts)
    page = (ROOT / "docs" / "versions.md").read_text()
    assert f"-->\n\n{TOOL['table'](ROWS)}\n<!--" in page


@pytest.mark.parametrize("extra", FLOORS, ids=lambda extra: extra or "core")
def test_a_floor_is_the_version_that_was_run(extra):
    name, part = FLOORS[extra]
    for need in TOOL["requirements"](extra):
        package, floor = re.fullmatch(
            r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", need
        ).groups()  # no ceiling
        assert padded(ROWS[name][part][package]) == padded(floor), package


def test_every_extra_of_users_is_looked_at():
    development = {"docs", "test", "trainers"}
    assert {*FLOORS, *development} - {"", "benchmark"} == set(PROJECT["optional-dependencies"])


def test_the_classifiers_are_the_pythons_that_were_run():
    claimed = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    parts = [row[kind] for row in ROWS.values() for kind in ("library", "benchmark") if kind in row]
    assert claimed == {PINNED, *map(minor, parts)}
    oldest = min(claimed, key=lambda version: int(version.split(".")[1]))
    assert PROJECT["requires-python"] == f">={oldest}"
    assert minor(ROWS["oldest"]["library"]) == oldest
    assert BENCH["requires-python"] == f">={minor(ROWS['benchmark']['benchmark'])}"


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_workflows_are_yaml(path):
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(path.read_text()), dict)
