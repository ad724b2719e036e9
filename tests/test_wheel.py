"""The wheel beside the oldest versions: nothing of the user's is replaced, and the README runs.

Elsewhere than in an environment at the floors (`make test-versions`) there is nothing to see.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")


def padded(release):
    return [*map(int, release.split(".")), 0, 0, 0][:3]


def is_at_the_floors():
    """Whether the core, torch and jax are the oldest that the package allows."""
    try:
        needs = "\n".join(requires("stormplus"))
        floors = re.findall(r"^([\w-]+)>=([\d.]+)(?:; extra == '(?:torch|jax)')?$", needs, re.M)
        return all(padded(version(name).split("+")[0]) == padded(v) for name, v in floors)
    except PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not is_at_the_floors(), reason="not an environment at the floors")


def run(*command, **options):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        check=False, capture_output=True, text=True, timeout=300, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by the hatchling that is there: nothing is fetched."""
    folder = tmp_path_factory.mktemp("clone")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "_native.so")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    run("-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist", cwd=folder)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_installing_it_would_replace_nothing(wheel, tmp_path):
    report = run(
        "-m", "pip", "install", "--dry-run", "--quiet", "--no-index", "--report", "-",
        f"{wheel}[torch,jax,theory]", cwd=tmp_path,
    )  # fmt: skip
    named = {entry["metadata"]["name"] for entry in json.loads(report)["install"]}
    assert named <= {"stormplus"}


def test_it_runs_the_readme(wheel, tmp_path):
    home = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", home, wheel)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) >= 4
    script = tmp_path / "readme.py"
    script.write_text("\n".join([*blocks, "import stormplus; print(stormplus.__file__)"]))
    said = run(script, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(home)})
    assert said.splitlines()[-1].startswith(str(home))
