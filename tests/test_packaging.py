"""The distributions: their files, metadata, and builds with and without a compiler."""

import email
import os
import re
import runpy
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.pages import ROOT, run_python

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".versions", "out", "site", "dist", "build", ".*_cache", ".hypothesis",
    "*.egg-info",
)  # fmt: skip
LITTER = (
    "src/stormplus/__pycache__/rules.cpython-311.pyc",
    "benchmark/stormplus_bench/benchmark_stormplus/outputs/run.parquet",
    "benchmark/stormplus_bench/benchmark_stormplus/__cache__/a/output.pkl",
    "out/demo.png",
)
KERNELS = "stormplus/torch/kernels"
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
# The folder of each distribution, the root of its package, the package.
PROJECTS = {
    "stormplus": (".", "src", "stormplus"),
    "stormplus-bench": ("benchmark", "benchmark", "stormplus_bench"),
}


def test_both_distributions_and_the_citation_have_one_version():
    versions = {
        re.search(r'__version__ = "(.+)"', (ROOT / root / package / "__init__.py").read_text())[1]
        for _, root, package in PROJECTS.values()
    }
    (version,) = versions
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "benchmark" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository with the litter of a working folder."""
    folder = tmp_path_factory.mktemp("clone") / "stormplus"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    for litter in LITTER:
        (folder / litter).parent.mkdir(parents=True, exist_ok=True)
        (folder / litter).write_text("litter")
    return folder


def build(folder, kind, target, **options):
    pytest.importorskip("hatchling")
    done = run_python("-m", "hatchling", "build", "-t", kind, "-d", target, cwd=folder, **options)
    assert done.returncode == 0, done.stderr
    (path,) = target.iterdir()
    return path


@pytest.fixture(scope="module")
def wheels(clone, tmp_path_factory):
    return {
        project: build(clone / folder, "wheel", tmp_path_factory.mktemp("wheel"))
        for project, (folder, _, _) in PROJECTS.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("project", PROJECTS)
def test_a_wheel_has_its_source_tree_and_nothing_else(wheels, project):
    wheel, (_, root, package) = zipfile.ZipFile(wheels[project]), PROJECTS[project]
    expected = {
        path.relative_to(ROOT / root).as_posix()
        for path in (ROOT / root / package).rglob("*")
        if path.is_file() and not {"__pycache__", "__cache__", "outputs"} & {*path.parts}
    }
    expected = {name for name in expected if not name.startswith(f"{KERNELS}/_native.")}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    native = {name for name in names if name.startswith(f"{KERNELS}/_native.")}
    assert names - native == expected
    assert len(native) == (1 if project == "stormplus" and COMPILER else 0)
    (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = email.message_from_bytes(wheel.read(metadata))
    assert metadata["Name"] == project
    assert metadata["License-Expression"] == "Apache-2.0"
    needs = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    if project == "stormplus":
        assert [re.match(r"\w+", need)[0] for need in needs] == ["numpy"]
        assert {"torch", "jax", "theory"} <= set(metadata.get_all("Provides-Extra"))
        assert "stormplus/py.typed" in names
        assert "-py3-none-" in wheels[project].name
    else:
        (entries,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
        assert "stormplus = stormplus_bench.cli:main" in wheel.read(entries).decode()


@pytest.mark.long
def test_the_wheels_work_when_unpacked(wheels, tmp_path):
    for wheel in wheels.values():
        zipfile.ZipFile(wheel).extractall(tmp_path)

    def check(code):
        done = run_python("-c", code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import sys, stormplus; stormplus.minimize(lambda x, xi: x, 1.0, None, 3); "
    code += "assert not {'torch', 'jax'} & set(sys.modules); print(stormplus.__file__)"
    assert check(code).startswith(str(tmp_path))
    assert "smooth" in check("from stormplus_bench.cli import main; main(['compare', '--list'])")


@pytest.fixture
def broken_compiler(tmp_path):
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "cc"
    compiler.write_text("#!/bin/sh\necho 'no headers' >&2\nexit 1\n")
    compiler.chmod(0o755)
    return str(compiler.parent)


@pytest.mark.long
@pytest.mark.parametrize("way", ["switched off", "no compiler", "broken compiler"])
def test_a_build_without_native_kernels_succeeds(clone, tmp_path, broken_compiler, way):
    environment = {
        "switched off": {"PATH": os.environ["PATH"], "STORMPLUS_NATIVE": "0"},
        "no compiler": {"PATH": str(tmp_path / "empty")},
        "broken compiler": {"PATH": broken_compiler},
    }[way]
    wheel = build(clone, "wheel", tmp_path / "dist", env=environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_native" in name]


@pytest.mark.long
def test_a_build_that_requires_native_kernels_fails_without_a_compiler(clone, broken_compiler):
    pytest.importorskip("hatchling")
    environment = {"PATH": broken_compiler, "STORMPLUS_NATIVE": "1"}
    done = run_python("-m", "hatchling", "build", "-t", "wheel", cwd=clone, env=environment)
    assert done.returncode != 0
    assert "no headers" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("platform", "host", "compiler", "flags"),
    [
        ("linux", "linux-x86_64", "/usr/bin/gcc", {"-fPIC", "-fopenmp"}),
        ("darwin", "macosx-11.0-arm64", "/usr/bin/clang", {"arm64", "-mmacosx-version-min=11.0"}),
        ("darwin", "macosx-11.0-universal2", "/usr/bin/clang", {"arm64", "x86_64"}),
        ("win32", "win-amd64", "C:/VC/bin/cl.exe", {"/LD", "/openmp", "/Fe:_native.dll"}),
    ],
)
def test_the_compilers_command_line(monkeypatch, platform, host, compiler, flags):
    hook = pytest.importorskip("hatchling") and runpy.run_path(str(ROOT / "hatch_build.py"))
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("sysconfig.get_platform", lambda: host)
    command = hook["command"](compiler, Path("native.c"), Path("_native.dll"), True)
    assert flags <= set(command)


@pytest.mark.long
def test_the_source_distribution_has_no_litter(clone, tmp_path):
    with tarfile.open(build(clone, "sdist", tmp_path)) as archive:
        names = archive.getnames()
    assert not [name for name in names if re.search(r"\.pyc$|/_native\.", name)]
    tops = {name.split("/")[1] for name in names if "/" in name}
    assert {"src", "tests", "docs", "examples", "research", "pyproject.toml"} <= tops
    assert not tops & {"out", "site", "dist", ".venv"}
