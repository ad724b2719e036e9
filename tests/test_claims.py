"""What the metadata claim is what `make test-versions` has run."""

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


@pytest.mark.parametrize("extra", FLOORS, ids=lambda extra: extra or "core")
def test_a_floor_is_a_version_that_was_run_without_failures(extra):
    name, part = FLOORS[extra]
    assert ROWS[name][part]["failed"] == 0 < ROWS[name][part]["passed"]
    for need in TOOL["requirements"](extra):
        package, floor = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", need).groups()
        assert padded(ROWS[name][part][package]) == padded(floor), package


def test_every_extra_of_users_is_looked_at():
    development = {"docs", "test", "trainers"}
    assert {*FLOORS, *development} - {"", "benchmark"} == set(PROJECT["optional-dependencies"])


def test_no_python_is_claimed_that_was_not_run():
    def minor(part):
        return ".".join(part["python"].split(".")[:2])

    claimed = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    run = {minor(p) for row in ROWS.values() for p in row.values() if "python" in p}
    assert claimed == run | {"3.11"}  # the last by make test
    for project, extra in ((PROJECT, ""), (BENCH, TOOL["BENCHMARK"])):
        name, part = FLOORS[extra]
        assert project["requires-python"] == f">={minor(ROWS[name][part])}"
