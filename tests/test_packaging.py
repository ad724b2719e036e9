"""What is installed by the two distributions: the source trees, the metadata, nothing else."""

import email
import os
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

ROOT = Path(__file__).parents[1]
# What a clean clone has, and a working folder has beside it.
LEFT_BEHIND = shutil.ignore_patterns(
    ".git",
    ".venv",
    ".versions",
    "out",
    "site",
    "dist",
    "build",
    ".*_cache",
    ".hypothesis",
    "*.egg-info",
)
LITTER = (
    "src/stormplus/__pycache__/rules.cpython-311.pyc",
    "benchmark/stormplus_bench/benchmark_stormplus/outputs/run.parquet",
    "benchmark/stormplus_bench/benchmark_stormplus/__cache__/a/output.pkl",
    "out/demo.png",
    "site/a.html",
)
NATIVE = "stormplus/torch/core/_native.so"
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
# Of each distribution: its folder, the root of its package, the package.
PROJECTS = {
    "stormplus": (".", "src", "stormplus"),
    "stormplus-bench": ("benchmark", "benchmark", "stormplus_bench"),
}


def version_of(project):
    _, root, package = PROJECTS[project]
    text = (ROOT / root / package / "__init__.py").read_text()
    return re.search(r'__version__ = "(.+)"', text)[1]


def test_both_distributions_have_one_version_and_the_citation_names_it():
    version = version_of("stormplus")
    assert version_of("stormplus-bench") == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    assert "preferred-citation:" in citation
    assert "2111.01040" in citation
    assert (ROOT / "benchmark" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository, with the litter of a working folder in it: none may reach a wheel."""
    folder = tmp_path_factory.mktemp("clone") / "stormplus"
    shutil.copytree(ROOT, folder, ignore=LEFT_BEHIND)
    for litter in LITTER:
        (folder / litter).parent.mkdir(parents=True, exist_ok=True)
        (folder / litter).write_text("litter")
    return folder


def pip(*arguments, cwd):
    if not list(distributions(name="pip")):  # not find_spec: setuptools hooks into that
        pytest.skip("this environment has no pip")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        cwd=cwd, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(clone, tmp_path_factory):
    """The wheel of each distribution."""
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    found = {}
    for project, (folder, _, _) in PROJECTS.items():
        target = tmp_path_factory.mktemp("wheel")
        pip("wheel", "--no-deps", *isolation, "--wheel-dir", target, ".", cwd=clone / folder)
        (path,) = target.glob("*.whl")
        found[project] = zipfile.ZipFile(path)
    return found


def metadata_of(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@pytest.mark.long
@pytest.mark.parametrize("project", PROJECTS)
def test_a_wheel_holds_its_source_tree_and_nothing_else(wheels, project):
    wheel, (_, root, package) = wheels[project], PROJECTS[project]
    expected = {
        str(path.relative_to(ROOT / root))
        for path in (ROOT / root / package).rglob("*")
        if path.is_file() and not {"__pycache__", "__cache__", "outputs"} & {*path.parts}
    } - {NATIVE}
    if project == "stormplus" and COMPILER:
        expected.add(NATIVE)
    names = set(wheel.namelist())
    information = {name for name in names if re.match(r"stormplus\w*-[\d.]+\.dist-info/", name)}
    assert names - information == expected
    assert {name.split("/", 1)[1] for name in information} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"
    }  # fmt: skip
    # The comparison would let a stray file through if it lay in the tree: so look at its kind.
    for entry in wheel.infolist():
        name = entry.filename.rsplit("/", 1)[-1]
        if entry.filename == NATIVE:
            continue
        assert not re.search(r"^\.|~$|\.(pyc|pyo|so|orig|rej|log|bak|tmp|swp|ipynb|npz|pt)$", name)
        assert entry.file_size < 300_000, f"{entry.filename} has {entry.file_size} bytes"


@pytest.mark.long
@pytest.mark.parametrize("project", PROJECTS)
def test_metadata(wheels, project):
    metadata = metadata_of(wheels[project])
    assert metadata["Name"] == project
    assert metadata["Version"] == version_of("stormplus")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"].startswith(">=3.")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith(f"# {project}")
    assert "Programming Language :: Python :: 3" in metadata.get_all("Classifier")
    needs = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    if project == "stormplus":  # the core needs two packages; everything else is an extra
        assert sorted(re.match(r"\w+", need)[0] for need in needs) == ["click", "numpy", "scipy"]
        assert {"torch", "jax", "theory"} <= set(metadata.get_all("Provides-Extra"))
        assert "Typing :: Typed" in metadata.get_all("Classifier")
        assert "stormplus/py.typed" in wheels[project].namelist()
    else:
        assert any(need.startswith("stormplus[") and "torch" in need for need in needs)


@pytest.mark.long
def test_the_wheels_work_by_themselves(wheels, tmp_path):
    """The reference runs, no framework is imported, types are found, and the commands join."""

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True,
            text=True, env={"PYTHONPATH": str(tmp_path)}, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    install = ("install", "--no-deps", "--no-index", "--target", tmp_path)
    pip(*install, wheels["stormplus"].filename, cwd=tmp_path)
    assert run("""
import importlib.resources, sys
import stormplus
stormplus.minimize(lambda x, xi: x, 1.0, None, 3)
assert importlib.resources.files("stormplus").joinpath("py.typed").is_file()
assert not {"torch", "jax"} & set(sys.modules)
print(stormplus.__file__)
""").startswith(str(tmp_path))
    pip(*install, wheels["stormplus-bench"].filename, cwd=tmp_path)
    listed = run("from stormplus.cli import main; main(['compare', '--list'])")
    assert "smooth: Smooth problems and digits" in listed


@pytest.mark.long
@pytest.mark.parametrize(
    "way", ["switched off", "no compiler", "a compiler that fails", "insisted"]
)
def test_a_build_without_native_passes_succeeds_unless_they_are_asked_for(clone, tmp_path, way):
    pytest.importorskip("hatchling")
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    environment = {"PATH": str(broken.parent)}
    if way in ("one that fails", "insisted"):
        broken.write_text("#!/bin/sh\necho 'no headers' >&2\nexit 1\n")
        broken.chmod(0o755)
    environment |= {"switched off": {"STORMPLUS_NATIVE": "0", "PATH": os.environ["PATH"]}}.get(
        way, {}
    )
    environment |= {"STORMPLUS_NATIVE": "1"} if way == "insisted" else {}
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=clone, check=False, capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    if way == "insisted":
        assert done.returncode != 0
        assert "could not be built" in done.stderr + done.stdout
        assert "no headers" in done.stderr + done.stdout
        return
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert NATIVE not in zipfile.ZipFile(wheel).namelist()


@pytest.mark.long
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
        assert not [name for name in archive.getnames() if name.endswith((".pyc", ".so"))]
    assert {"src", "tests", "docs", "examples", "pyproject.toml", "README.md", "LICENSE"} <= tops
    assert not tops & {"out", "site", "dist", ".venv"}


@pytest.mark.long
def test_the_release_tool_builds_checks_and_lists(clone, tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("twine")  # which `make release-check` installs
    done = subprocess.run(
        [sys.executable, str(clone / "tools" / "release.py"), str(tmp_path / "release")],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, listed = done.stdout.split("would be uploaded:")
    version = version_of("stormplus")
    for name in ("stormplus", "stormplus_bench"):
        assert f"  {name}-{version}.tar.gz  " in listed
    assert f"  stormplus_bench-{version}-py3-none-any.whl  " in listed
    wheels = [path.name for path in (tmp_path / "release").glob("stormplus-*.whl")]
    assert len(wheels) == 1
    if "-linux_" in wheels[0]:  # the index would refuse it
        assert f"would not: {wheels[0]}" in listed
