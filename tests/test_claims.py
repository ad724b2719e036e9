"""What the metadata claims is what `make test-versions` has run."""

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
# Where each extra was run at its floors: the library's in the oldest environment.
FLOORS = (
    dict.fromkeys(TOOL["LIBRARY"], "oldest")
    | {
        extra: name
        for name, environment in TOOL["ENVIRONMENTS"].items()
        for extra in environment.trainers + environment.alone
    }
    | {TOOL["BENCHMARK"]: "benchmark"}
)


def padded(version):
    return [*map(int, version.split("+")[0].split(".")), 0, 0, 0][:3]


def minor(version):
    return ".".join(version.split(".")[:2])


def test_nothing_that_was_run_failed():
    assert {"oldest", "between", "newest", "benchmark"} <= set(ROWS)
    for row in ROWS.values():
        for part in row.values():
            assert part["failed"] == 0
            assert part["passed"] > 50


@pytest.mark.parametrize("extra", FLOORS, ids=lambda extra: extra or "core")
def test_a_floor_is_the_version_that_was_run(extra):
    row = ROWS[FLOORS[extra]]
    kinds = dict.fromkeys(TOOL["LIBRARY"], "library") | {TOOL["BENCHMARK"]: "benchmark"}
    ran = row[kinds.get(extra, "trainers")]
    for need in TOOL["requirements"](extra):
        name, floor = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", need).groups()  # no ceiling
        assert padded(ran[name]) == padded(floor), name


def test_every_extra_of_users_is_looked_at():
    development = {"docs", "test", "trainers"}
    assert {*FLOORS, *development} - {"", "benchmark"} == set(PROJECT["optional-dependencies"])


def test_the_classifiers_are_the_pythons_that_were_run():
    claimed = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    parts = [row[kind] for row in ROWS.values() for kind in ("library", "benchmark") if kind in row]
    assert claimed == {PINNED, *(minor(part["python"]) for part in parts)}
    oldest = min(claimed, key=lambda version: int(version.split(".")[1]))
    assert PROJECT["requires-python"] == f">={oldest}"
    assert minor(ROWS["oldest"]["library"]["python"]) == oldest
    assert BENCH["requires-python"] == f">={minor(ROWS['benchmark']['benchmark']['python'])}"


def test_the_page_shows_what_was_run():
    page = (ROOT / "docs" / "versions.md").read_text()
    assert f"-->\n\n{TOOL['table'](ROWS)}\n<!--" in page
