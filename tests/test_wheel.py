"""In an environment at the floors (`make test-versions`), installing the wheel replaces nothing."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def padded(release):
    return [*map(int, release.split(".")), 0, 0, 0][:3]


def is_at_the_floors():
    """Whether numpy, torch and jax are the oldest that the package allows."""
    try:
        needs = "\n".join(requires("stormplus"))
        floors = re.findall(r"^([\w-]+)>=([\d.]+)(?:; extra == '(?:torch|jax)')?$", needs, re.M)
        return all(padded(version(name).split("+")[0]) == padded(v) for name, v in floors)
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_at_the_floors(), reason="not an environment at the floors")
def test_installing_it_would_replace_nothing(tmp_path):
    def run(*command):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("_native.*"))
    run("hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    options = ("--dry-run", "--quiet", "--no-index", "--report", "-")
    report = run("pip", "install", *options, f"{wheel}[torch,jax,theory]")
    assert {part["metadata"]["name"] for part in json.loads(report)["install"]} <= {"stormplus"}
