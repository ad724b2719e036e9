"""What is installed: the source tree, the metadata, and nothing else."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
# What a clean clone has, and a working folder has beside it.
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv", "out", "site", "dist", "build", ".*_cache", ".hypothesis", "*.egg-info"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository, with the litter of a working folder in it: none may reach the wheel."""
    folder = tmp_path_factory.mktemp("clone") / "stormplus"
    shutil.copytree(ROOT, folder, ignore=LEFT_BEHIND)
    for litter in (
        "src/stormplus/__pycache__/rules.cpython-311.pyc",
        "benchmark/outputs/run.parquet",
        "benchmark/__cache__/a/output.pkl",
        "out/demo.png",
        "site/a.html",
    ):
        (folder / litter).parent.mkdir(parents=True, exist_ok=True)
        (folder / litter).write_text("litter")
    return folder


def pip(*arguments, cwd):
    if not list(distributions(name="pip")):  # not find_spec: setuptools hooks into that
        pytest.skip("this environment has no pip")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        cwd=cwd, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(target), ".", cwd=clone)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_source_tree_and_nothing_else(wheel):
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    # The benchmark travels as `_benchmark`, for the command line.
    benchmark = ROOT / "benchmark"
    expected |= {
        str("stormplus/_benchmark" / path.relative_to(benchmark))
        for path in benchmark.rglob("*")
        if path.suffix in (".py", ".yml") and "__cache__" not in path.parts
    }
    names = set(wheel.namelist())
    information = {name for name in names if re.match(r"stormplus-[\d.]+\.dist-info/", name)}
    assert names - information == expected
    assert {name.split("/", 1)[1] for name in information} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"
    }  # fmt: skip
    assert "stormplus/py.typed" in names


def test_nothing_stray_in_the_source_tree(wheel):
    """The list above would let a stray file through if it lay in `src`: so look at its kind."""
    for entry in wheel.infolist():
        name = entry.filename.rsplit("/", 1)[-1]
        assert not re.search(r"^\.|~$|\.(pyc|pyo|so|orig|rej|log|bak|tmp|swp|ipynb|npz|pt)$", name)
        assert entry.file_size < 300_000, f"{entry.filename} has {entry.file_size} bytes"


def test_metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/stormplus/__init__.py").read_text())[
        1
    ]
    assert metadata["Name"] == "stormplus"
    assert metadata["Version"] == version
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"].startswith(">=3.")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# stormplus")
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    assert "Programming Language :: Python :: 3" in classifiers
    # The core needs two packages; everything else is an extra.
    core = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(re.match(r"\w+", need)[0] for need in core) == ["numpy", "scipy"]
    assert {"torch", "jax"} <= set(metadata.get_all("Provides-Extra"))


def test_citation_names_this_version_and_the_paper():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/stormplus/__init__.py").read_text())[
        1
    ]
    assert f"\nversion: {version}\n" in citation
    assert "preferred-citation:" in citation
    assert "2111.01040" in citation


def test_wheel_installs_and_imports_without_frameworks(wheel, tmp_path):
    """From the wheel alone: the reference runs, no framework is imported, types are found."""
    pip(
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path),
        wheel.filename,
        cwd=tmp_path,
    )
    script = """
import importlib.resources, sys
import stormplus
stormplus.minimize(lambda x, xi: x, 1.0, None, 3)
assert importlib.resources.files("stormplus").joinpath("py.typed").is_file()
assert not {"torch", "jax"} & set(sys.modules)
print(stormplus.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=False, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_source_distribution_has_no_litter(clone, tmp_path):
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)],
        cwd=clone, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
        assert not [name for name in archive.getnames() if name.endswith(".pyc")]
    assert {"src", "tests", "docs", "examples", "pyproject.toml", "README.md", "LICENSE"} <= tops
    assert not tops & {"out", "site", "dist", ".venv"}
